"""Generating the images that diffusion models are asked about, and making others from training images."""

from unde.diffusion.sample import Samples, sample
from unde.tasks.perturb import augment

__all__ = ["Samples", "augment", "sample"]
