"""Learning, saving and transferring weights of parameter groups."""

from unde.weights.learn import learn_weights
from unde.weights.weights import Weights

__all__ = ["Weights", "learn_weights"]
