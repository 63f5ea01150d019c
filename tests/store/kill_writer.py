"""A process that builds an index and is killed when it is about to put a shard. Run as a program."""

import os
import signal
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

import toy
from unde.store.remote import Remote

url, count = sys.argv[1], int(sys.argv[2])
seen, put = [], Remote.write_bytes


def write_bytes(self: Remote, content: bytes) -> None:
    seen.extend([self] * (self.parent.name == "shards"))
    if len(seen) == count:
        os.kill(os.getpid(), signal.SIGKILL)
    put(self, content)


torch.set_num_threads(1)
Remote.write_bytes = write_bytes
toy.build(url, 30, ids=list(range(30)))
