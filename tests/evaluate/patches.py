"""What other processes need for tail-patch: importable."""

import torch
from test_tail_patch import classifier, points

from unde import Setup
from unde.tasks import Classification


def sgd(params):
    return torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=0.01)


def make():
    return Setup(classifier(), Classification(), points(10))
