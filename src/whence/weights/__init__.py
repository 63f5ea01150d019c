"""Learning, choosing, saving and transferring weights of parameter groups."""

from whence.weights.choose import choose
from whence.weights.learn import learn_weights
from whence.weights.weights import Weights

__all__ = ["Weights", "choose", "learn_weights"]
