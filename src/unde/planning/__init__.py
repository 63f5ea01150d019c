"""Plan before you pay: what a run will need, from shapes alone."""

from unde.planning.plan import Group, Plan, plan

__all__ = ["Group", "Plan", "plan"]
