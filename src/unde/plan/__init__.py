"""Plan before you pay: what a run will need, from shapes alone."""

from unde.plan.build import show_build
from unde.plan.numbers import Group, Plan
from unde.plan.plan import plan

__all__ = ["Group", "Plan", "plan", "show_build"]
