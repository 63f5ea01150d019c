"""The features of a training set on disk: shards, manifest, resume, checks."""

from unde.index.index import Index
from unde.index.queries import QueryFeatures

__all__ = ["Index", "QueryFeatures"]
