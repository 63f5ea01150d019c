"""A project that another process can make: importable, the same every time."""

import os
import time

import torch

import toy
from unde import Setup
from unde.tasks import Classification


def make(n: int = 22) -> Setup:
    return Setup(toy.net(), Classification(), toy.data(n))


def moody() -> Setup:
    """Another model every time."""
    moody.calls += 1
    return Setup(toy.net(moody.calls), Classification(), toy.data(22))


moody.calls = 0


class Slow(Classification):
    """As it is, but with time for a kill."""

    seconds = 0.05

    def identity(self):
        return Classification().identity()

    def loss(self, model, batch):
        time.sleep(self.seconds)
        return super().loss(model, batch)


class Slower(Slow):
    seconds = 0.3


def slower() -> Setup:
    return Setup(toy.net(), Slower(), toy.data(60))


def slow() -> Setup:
    return Setup(toy.net(), Slow(), toy.data(60))


class Unlucky(Classification):
    """Fails on whole passes that hold example 9."""

    def identity(self):
        return super().identity() | {"name": "Unlucky"}

    def loss(self, model, batch):
        if len(batch[0]) == 4 and bool((batch[0] == toy.data(22)[0][9]).all(1).any()):
            raise RuntimeError("out of luck")
        return super().loss(model, batch)


def unlucky() -> Setup:
    return Setup(toy.net(), Unlucky(), toy.data(22))


def sixty() -> Setup:
    return make(60)


def many() -> Setup:
    return make(600)


def alike() -> Setup:
    x, y = toy.data(4)
    return Setup(toy.net(), Classification(), (x.repeat(6, 1), y.repeat(6)))


POINTS = torch.linspace(0, 1, 20)


def mean_of(indices, seed):
    return POINTS[indices].mean()


def slow_mean_of(indices, seed):
    time.sleep(0.3)
    return mean_of(indices, seed)


def closeness(model):
    return -((model - torch.tensor([0.1, 0.9])) ** 2)


def spoilt() -> Setup:
    x, y = toy.data(22)
    x[9] = float("nan")
    return Setup(toy.net(), Classification(), (x, y))


def note_gpu(folder, number):
    (folder / str(number)).write_text(os.environ["CUDA_VISIBLE_DEVICES"])
    time.sleep(0.5)
