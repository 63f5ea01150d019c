"""The features of a training set on disk: shards, manifest, resume, checks."""

from whence.index.index import Index
from whence.index.queries import QueryFeatures

__all__ = ["Index", "QueryFeatures"]
