"""The command line: one file for each family of commands."""

from unde.cli.app import app, main

__all__ = ["app", "main"]
