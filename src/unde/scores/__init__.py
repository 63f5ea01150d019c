"""Group-resolved scores: totals, the best examples, regrouping, self-influence, contributions of tokens."""

from unde.scores.group_scores import GroupScores, WeightsLike
from unde.scores.top import Top
from unde.scores.train_side import TrainSide

__all__ = ["GroupScores", "Top", "TrainSide", "WeightsLike"]
