"""Data sets whose contributors are known, for evaluation of fine-grained attribution."""

from experiments.datasets.attributes import Attributes, Queries
from experiments.datasets.emoji_set import emoji
from experiments.datasets.robot_sets import pretraining_robots, robot_queries, robots

__all__ = ["Attributes", "Queries", "emoji", "pretraining_robots", "robot_queries", "robots"]
