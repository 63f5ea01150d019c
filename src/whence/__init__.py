"""whence: which training examples made a trained PyTorch model do that?"""

from whence import evaluate, methods, tasks
from whence.errors import WhenceError
from whence.groups import Groups
from whence.index import Index
from whence.scores import GroupScores
from whence.setup import Setup
from whence.tasks import Task
from whence.weights import Weights, learn_weights

__version__ = "0.1.0"
__all__ = [
    "GroupScores",
    "Groups",
    "Index",
    "Setup",
    "Task",
    "Weights",
    "WhenceError",
    "evaluate",
    "learn_weights",
    "methods",
    "tasks",
]
