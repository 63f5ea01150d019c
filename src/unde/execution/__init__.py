"""Running numbered jobs: who runs them and in what order makes no difference to what they write."""

from unde.execution.array import Array
from unde.execution.base import Executor, Job, JobsFailed
from unde.execution.named import ending, named
from unde.execution.processes import Processes
from unde.execution.ray import Ray
from unde.execution.serial import SERIAL, Serial
from unde.execution.shown import shown

__all__ = [
    "SERIAL",
    "Array",
    "Executor",
    "Job",
    "JobsFailed",
    "Processes",
    "Ray",
    "Serial",
    "ending",
    "named",
    "shown",
]
