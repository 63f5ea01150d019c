"""Features: one pass over data gives per-example, per-parameter projected gradients."""

from unde.gradients.collector import Collector, Coverage
from unde.gradients.coverage import plan_coverage
from unde.gradients.parameters import Unit, make_units, placement

__all__ = ["Collector", "Coverage", "Unit", "make_units", "placement", "plan_coverage"]
