"""What other processes need for tail-patch: importable."""

from test_tail_patch import classifier, points

from unde import Setup
from unde.tasks import Classification


def make():
    return Setup(classifier(), Classification(), points(10))
