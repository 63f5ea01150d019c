"""The paper's models and sizes: `run(name, arguments)` behind `python -m experiments run NAME --scale paper`."""

from experiments.scale.command import run

__all__ = ["run"]
