"""Training functions that other processes can import, and a bank run as a program of its own."""

import contextlib
import itertools
import os
import random
import signal
import sys
import time

import numpy as np
import torch

from unde.evaluate import Bank

N_TRAIN, SUBSETS, QUICK = 30, 10, 3
GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(N_TRAIN, 4, generator=GENERATOR)
Y = X @ torch.tensor([1.0, -2.0, 0.5, 0.0]) + torch.randn(N_TRAIN, generator=GENERATOR)
trained = 0


def train(indices, seed, pause=0.0):
    """Some steps of SGD, with luck from every global generator that a user might forget to seed."""
    luck = random.random() + np.random.rand()
    weight = torch.randn(4).requires_grad_()
    for _ in range(5):
        batch = indices[torch.randint(len(indices), (8,)).numpy()]
        loss = ((X[batch] @ weight - Y[batch]) ** 2).mean()
        (gradient,) = torch.autograd.grad(loss, weight)
        weight = (weight - 0.1 * gradient).detach().requires_grad_()
    time.sleep(pause)
    return weight + luck + seed % 7


def utility(weight):
    noise = torch.randn(3)  # the same for all models
    residual = X @ weight - Y
    return {"near": -(residual[:5] ** 2), "noise": noise + 0 * weight[0]}


def fail_on_some(indices, seed):
    if 5 in indices:
        raise RuntimeError("no luck today")
    return train(indices, seed)


def fail(indices, seed):
    raise RuntimeError("no luck today")


def die(indices=None, seed=None):
    os.kill(os.getpid(), signal.SIGKILL)


class Deadly:
    """A training function that ends the first `arrivals` processes that it is sent to, and the first that trains.

    `end` says how. What happened is noted in `folder`.
    """

    def __init__(self, folder, arrivals, end):
        self.folder, self.arrivals, self.end = folder, arrivals, end

    def __setstate__(self, state):
        self.__dict__ = state
        if self._nth("arrived") < self.arrivals:
            self.end()

    def __call__(self, indices, seed):
        if self._nth("trained") == 0:
            self.end()
        return train(indices, seed)

    def _nth(self, event):
        for n in itertools.count():
            with contextlib.suppress(FileExistsError):
                (self.folder / f"{event}-{n}").touch(exist_ok=False)
                return n


def give_up():
    os._exit(1)


def count_threads(weight):
    return np.array([float(torch.get_num_threads())])


def stall_after_some(indices, seed):
    """Quick for as many models as QUICK in each process, then slow enough to be killed in the middle."""
    global trained
    trained += 1
    return train(indices, seed, pause=0.0 if trained <= QUICK else 600.0)


def run(path, **changes):
    arguments = {"train": train, "utility": utility, "name": "linear regression"}
    sizes = {"n_train": N_TRAIN, "subsets": SUBSETS, "seeds_per_subset": 2}
    return Bank.run(path, **{**arguments, **sizes, **changes})


def assert_same(a, b):
    np.testing.assert_array_equal(a.masks, b.masks)
    np.testing.assert_array_equal(a.seeds, b.seeds)
    assert a.by_seed.keys() == b.by_seed.keys()
    for name in a.by_seed:
        np.testing.assert_array_equal(a.by_seed[name], b.by_seed[name])


if __name__ == "__main__":
    run(sys.argv[1], train=stall_after_some, processes=2)
