"""Running numbered jobs: who runs them and in what order makes no difference to what they write."""

from unde.execution.base import Executor
from unde.execution.serial import Serial

__all__ = ["Executor", "Serial"]
