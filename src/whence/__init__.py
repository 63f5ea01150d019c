"""whence: which training examples made a trained PyTorch model do that?"""

from whence.errors import WhenceError

__version__ = "0.1.0"
__all__ = ["WhenceError"]
