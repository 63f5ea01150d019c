"""Learning, choosing, saving and transferring weights of parameter groups."""

from unde.weights.cross_validate import choose
from unde.weights.learn import learn_weights
from unde.weights.weights import Weights

__all__ = ["Weights", "choose", "learn_weights"]
