"""Group-resolved scores: totals, the best examples, regrouping, self-influence, contributions of tokens."""

from unde.scoring.arrays import ArrayScores, from_arrays
from unde.scoring.candidates import CandidateScores
from unde.scoring.documents import Pieces, documents
from unde.scoring.group_scores import GroupScores
from unde.scoring.ranked import WeightsLike
from unde.scoring.table import Table
from unde.scoring.top import Top
from unde.scoring.train_side import TrainSide

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
