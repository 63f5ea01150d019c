"""Executors of numbered jobs; results do not depend on who runs them, or in which order."""

from unde.parallel.base import SERIAL, Executor, Job, JobsFailed, Serial
from unde.parallel.processes import Processes
from unde.parallel.ray import Ray
from unde.parallel.registry import Array, close_workers, get_executor, run_with_progress

__all__ = [
    "SERIAL",
    "Array",
    "Executor",
    "Job",
    "JobsFailed",
    "Processes",
    "Ray",
    "Serial",
    "close_workers",
    "get_executor",
    "run_with_progress",
]
