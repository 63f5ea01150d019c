"""Generating the images that diffusion models are asked about, and making others from training images."""

from whence.diffusion.augment import augment
from whence.diffusion.sample import Samples, sample

__all__ = ["Samples", "augment", "sample"]
