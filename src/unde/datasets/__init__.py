"""Data sets whose contributors are known, for evaluation of fine-grained attribution."""

from unde.datasets.attributes import Attributes, Queries
from unde.datasets.emoji_set import emoji
from unde.datasets.robot_sets import pretraining_robots, robot_queries, robots

__all__ = ["Attributes", "Queries", "emoji", "pretraining_robots", "robot_queries", "robots"]
