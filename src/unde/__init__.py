"""unde: which training examples made a trained PyTorch model do that?"""

from unde import evaluate, methods, tasks
from unde.errors import UndeError
from unde.groups import Groups
from unde.index import Index
from unde.scoring import GroupScores
from unde.setup import Setup
from unde.tasks import Task
from unde.version import __version__
from unde.weights import Weights, learn_weights

__all__ = [
    "GroupScores",
    "Groups",
    "Index",
    "Setup",
    "Task",
    "UndeError",
    "Weights",
    "__version__",
    "evaluate",
    "learn_weights",
    "methods",
    "tasks",
]
