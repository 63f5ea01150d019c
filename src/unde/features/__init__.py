"""Features: one pass over data gives per-example, per-parameter projected gradients."""

from unde.features.collector import Collector, Coverage
from unde.features.coverage import plan_coverage
from unde.features.units import Unit, make_units, placement

__all__ = ["Collector", "Coverage", "Unit", "make_units", "placement", "plan_coverage"]
