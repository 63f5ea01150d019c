"""The index as people use it: build, open, features of queries, scores, calibration, weights, trust."""

from unde.build.queries import QueryFeatures
from unde.index.calibration import Calibration
from unde.index.index import Index

__all__ = ["Calibration", "Index", "QueryFeatures"]
