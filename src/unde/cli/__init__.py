"""The command line: unde demo | plan | build | finish | learn | attribute | evaluate | report | verify | push | pull |
bench."""

from unde.cli.app import app, main

__all__ = ["app", "main"]
