"""The command line: unde demo | plan | build | learn | attribute | evaluate | report | verify | bench."""

from unde.cli.app import app, main

__all__ = ["app", "main"]
