"""Training functions that other processes can import, and a bank run as a program of its own."""

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


def die(indices, seed):
    os.kill(os.getpid(), signal.SIGKILL)


def count_threads(weight):
    return np.array([float(torch.get_num_threads())])


def stall_after_some(indices, seed):
    """Quick for as many models as QUICK in each process, then slow enough to be killed in the middle."""
    global trained
    trained += 1
    return train(indices, seed, pause=0.0 if trained <= QUICK else 600.0)


if __name__ == "__main__":
    Bank.run(
        sys.argv[1],
        train=stall_after_some,
        utility=utility,
        n_train=N_TRAIN,
        subsets=SUBSETS,
        seeds_per_subset=2,
        processes=2,
        name="linear regression",
    )
