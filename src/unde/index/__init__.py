"""The index as people use it: build, open, features of queries, scores, calibration, weights, trust."""

from unde.index.calibration import Calibration
from unde.index.index import Index
from unde.index.query_features import QueryFeatures

__all__ = ["Calibration", "Index", "QueryFeatures"]
