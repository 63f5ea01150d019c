"""The index as people use it: build, open, features of queries, scores, weights by self-retrieval, trust."""

from unde.build.queries import QueryFeatures
from unde.index.index import Index

__all__ = ["Index", "QueryFeatures"]
