"""Running numbered jobs: who runs them and in what order makes no difference to what they write."""

from unde.execution.array import Array
from unde.execution.base import Executor, Job, JobsFailed
from unde.execution.named import named
from unde.execution.processes import Processes
from unde.execution.ray import Ray
from unde.execution.serial import SERIAL, Serial

__all__ = ["SERIAL", "Array", "Executor", "Job", "JobsFailed", "Processes", "Ray", "Serial", "named"]
