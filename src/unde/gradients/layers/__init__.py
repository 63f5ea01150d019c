"""One small rule for each layer type: its per-example parameter gradients from activations and output gradients.

Adding a layer type is one subclass of `Rule` under `@register(Type)` and one row in the tests.
"""

from unde.gradients.layers import conv, experts, linear, norm
from unde.gradients.layers.base import Rule, rule_for

__all__ = ["Rule", "conv", "experts", "linear", "norm", "rule_for"]
