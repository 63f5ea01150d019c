"""The version of the package, for whoever notes what made a file."""

__version__ = "0.3.0"
