"""Features: one pass over data gives per-example, per-parameter projected gradients."""

from whence.features.collector import Collector, Coverage
from whence.features.plan import plan_coverage
from whence.features.units import Unit, make_units, placement

__all__ = ["Collector", "Coverage", "Unit", "make_units", "placement", "plan_coverage"]
