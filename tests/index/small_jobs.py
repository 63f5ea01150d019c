"""Workers for whom a few examples make several jobs of a kernel, as millions do for others, and killed workers."""

import os
import pickle
import random
import signal
import threading
from contextlib import contextmanager
from functools import partial
from unittest import mock

import psutil

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


def workers_of_this_process():
    return [worker for server in psutil.Process().children() for worker in server.children()]


@contextmanager
def killing(count, done, workers=workers_of_this_process, seed=0):
    """Workers are killed at random moments, up to `count`; between two kills something gets `done`, so
    that all ends in time on a slow machine too."""
    stop, killed, chance = threading.Event(), [], random.Random(seed)

    def kill():
        before = 0
        while len(killed) < count and not stop.wait(0.02):
            if len(done()) <= before:
                continue
            stop.wait(chance.uniform(0, 0.2))
            found = workers()
            if found:
                os.kill(chance.choice(found).pid, signal.SIGKILL)
                killed.append(1)
                before = len(done())

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        yield killed
    finally:
        stop.set()
        killer.join()
