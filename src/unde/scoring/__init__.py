"""Group-resolved scores: totals, the best examples, regrouping, scores of arrays and of candidates."""

from unde.scoring.arrays import ArrayFeatures, ArrayScores, from_arrays
from unde.scoring.base import WeightsLike
from unde.scoring.candidates import CandidateScores
from unde.scoring.documents import Pieces, documents
from unde.scoring.exact import ExactScores
from unde.scoring.group_scores import GroupScores
from unde.scoring.top import Table, Top
from unde.scoring.train_features import TrainFeatures

__all__ = [
    "ArrayFeatures",
    "ArrayScores",
    "CandidateScores",
    "ExactScores",
    "GroupScores",
    "Pieces",
    "Table",
    "Top",
    "TrainFeatures",
    "WeightsLike",
    "documents",
    "from_arrays",
]
