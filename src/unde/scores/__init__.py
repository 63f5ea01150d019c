"""Group-resolved scores: totals, the best examples, regrouping, self-influence, contributions of tokens."""

from unde.scores.group_scores import GroupScores, TrainSide, WeightsLike
from unde.scores.top import Top

__all__ = ["GroupScores", "Top", "TrainSide", "WeightsLike"]
