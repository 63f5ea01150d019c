"""Generating the images that diffusion models are asked about."""

from unde.diffusion.sample import Samples, sample

__all__ = ["Samples", "sample"]
