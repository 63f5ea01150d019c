"""Memory that malloc keeps for the next pass."""

import platform
import subprocess
import sys

import pytest

from unde import malloc

PROGRAM = """
import resource, torch
from unde.malloc import keep_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(4):
        step = [torch.ones(2**22) for _ in range(8)]  # 16 MiB each
        del step
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()

with keep_memory():
    pass  # from here on thresholds do not adapt
before, first = resident(), faults()
with keep_memory():
    with keep_memory():
        faults()
    kept, held = faults(), resident() - before
print(first, kept, held, resident() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="of malloc in glibc")
def test_memory_is_kept_until_the_outermost_block_ends():
    result = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    first, kept, held, after = map(int, result.stdout.split())
    assert first > 30_000 and kept < 500  # at least once for each page
    assert held > 100 * 2**20 and after < 20 * 2**20


def test_it_can_be_switched_off(monkeypatch):
    monkeypatch.setenv("UNDE_MALLOC", "0")
    monkeypatch.setattr(malloc.ctypes, "CDLL", lambda name: pytest.fail("switched off"))
    malloc._libc.cache_clear()
    try:
        with malloc.keep_memory():
            pass
    finally:
        malloc._libc.cache_clear()


def test_other_allocators_are_left_alone(monkeypatch):
    def none(name):
        raise OSError("no such library")

    monkeypatch.setattr(malloc.ctypes, "CDLL", none)
    malloc._libc.cache_clear()
    try:
        with malloc.keep_memory():
            assert malloc._libc("mallopt")(-1, 0) == 0
    finally:
        malloc._libc.cache_clear()
