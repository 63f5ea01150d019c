"""Workers for whom a few examples make several jobs of a kernel, as millions do for others."""

import pickle
from functools import partial
from unittest import mock

import unde.kernels.base
from unde.parallel import Processes

JOINED = 8 * 59 * 4  # bytes of features that are worked on together: a shard of the toy model, not two


class Sent:
    """A context that is made after blocks became small."""

    def __init__(self, context):
        self.context = context

    def __getstate__(self):
        return pickle.dumps(self.context)

    def __setstate__(self, state):
        unde.kernels.base.JOINED = JOINED
        self.context = pickle.loads(state)

    def close(self):
        if hasattr(self.context, "close"):
            self.context.close()


def call(function, sent, *job):
    function(sent.context, *job)


class Workers(Processes):
    def run(self, function, context, jobs):
        return super().run(partial(call, function), Sent(context), jobs)


def blocks():
    """The same in this process."""
    return mock.patch("unde.kernels.base.JOINED", JOINED)
