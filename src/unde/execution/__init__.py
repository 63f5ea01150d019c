"""Running numbered jobs: who runs them and in what order makes no difference to what they write."""

from unde.execution.base import Executor, Job, JobsFailed
from unde.execution.named import named
from unde.execution.processes import Processes
from unde.execution.serial import Serial

__all__ = ["Executor", "Job", "JobsFailed", "Processes", "Serial", "named"]
