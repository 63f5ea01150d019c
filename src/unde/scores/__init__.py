"""Group-resolved scores: totals, the best examples, regrouping, self-influence, contributions of tokens."""

from unde.scores.arrays import ArrayScores, from_arrays
from unde.scores.candidates import CandidateScores
from unde.scores.group_scores import GroupScores
from unde.scores.pieces import Pieces, documents
from unde.scores.ranked import WeightsLike
from unde.scores.table import Table
from unde.scores.top import Top
from unde.scores.train_side import TrainSide

__all__ = [
    "ArrayScores",
    "CandidateScores",
    "GroupScores",
    "Pieces",
    "Table",
    "Top",
    "TrainSide",
    "WeightsLike",
    "documents",
    "from_arrays",
]
