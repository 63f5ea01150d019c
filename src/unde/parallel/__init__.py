"""Running numbered jobs: who runs them and in what order makes no difference to what they write."""

from unde.parallel.array import Array
from unde.parallel.base import Executor, Job, JobsFailed
from unde.parallel.processes import Processes
from unde.parallel.progress import shown
from unde.parallel.ray import Ray
from unde.parallel.registry import ending, named
from unde.parallel.serial import SERIAL, Serial

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
