"""Generating the images that diffusion models are asked about, and making others from training images."""

from unde.diffusion.augment import augment
from unde.diffusion.sample import Samples, sample

__all__ = ["Samples", "augment", "sample"]
