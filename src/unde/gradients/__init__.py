"""Features: one pass over data gives per-example, per-parameter projected gradients."""

from unde.gradients.collector import Collector, Coverage
from unde.gradients.coverage import plan_coverage
from unde.gradients.parameters import Unit, describe_units, make_units, placement

__all__ = ["Collector", "Coverage", "Unit", "describe_units", "make_units", "placement", "plan_coverage"]
