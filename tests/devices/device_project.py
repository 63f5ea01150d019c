"""A project that worker processes make: its task notes where it runs."""

import os
from pathlib import Path

import pretended_device

import toy
from unde import Setup
from unde.tasks import Classification

FOLDER = "UNDE_TEST_NOTES"


class Noting(Classification):
    """Writes a file with the name of the device and the process."""

    def identity(self):
        return Classification().identity()

    def loss(self, model, batch):
        (Path(os.environ[FOLDER]) / f"{batch[0].device} {os.getpid()}").touch()
        return super().loss(model, batch)


def make() -> Setup:
    pretended_device.register()
    return Setup(toy.net(), Noting(), toy.data(150))
