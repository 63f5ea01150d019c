"""Memory that malloc keeps for the next pass."""

import platform
import subprocess
import sys

import pytest
import torch

from unde import pages
from unde.gradients.meter import Meter
from unde.pages import keep_pages, kept_pages, large

of_glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="of malloc in glibc")

FAULTS = """
import resource, torch
from unde.pages import keep_pages, kept_pages

def faults(blocks, size):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(4):
        step = [torch.ones(size) for _ in range(blocks)]
        del step
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()
"""

SMALL = """
first = faults(24, 2**18)
keep_pages()
faults(24, 2**18)
print(first, faults(24, 2**18))
"""

LARGE = """
keep_pages()
before = resident()
first = faults(8, 2**22)  # 16 MiB each: more than is always kept
with kept_pages():
    with kept_pages():
        faults(8, 2**22)
    kept, held = faults(8, 2**22), resident() - before
print(first, kept, held, resident() - before)
"""


def _told(program):
    found = subprocess.run(
        [sys.executable, "-c", FAULTS + program], capture_output=True, text=True, check=True
    )
    return list(map(int, found.stdout.split()))


@of_glibc
def test_pages_that_a_step_gave_back_are_there_for_the_next():
    first, kept = _told(SMALL)
    assert first > 10_000 and kept < 500


@of_glibc
def test_many_passes_keep_all_until_the_outermost_ends():
    first, kept, held, after = _told(LARGE)
    assert first > 30_000 and kept < 500  # at least once for each page
    assert held > 100 * 2**20 and after < 20 * 2**20


def test_no_meter_sees_it():
    keep_pages.cache_clear()
    with Meter() as meter:
        keep_pages()
        with kept_pages():
            pass
    assert meter.peak == 0 and keep_pages.cache_info().currsize == 1


def test_elsewhere_nothing_is_done(monkeypatch):
    def none(name):
        raise OSError("no such library")

    monkeypatch.setattr(pages.ctypes, "CDLL", none)
    pages._libc.cache_clear()
    keep_pages.cache_clear()
    try:
        keep_pages()
        with kept_pages():
            assert pages._libc("mallopt")(-1, 0) == 0
    finally:
        pages._libc.cache_clear()
        keep_pages.cache_clear()


def test_large_arrays_are_tensors_of_their_own():
    x = large(3, 5).fill_(2.0)
    assert x.shape == (3, 5) and x.dtype == torch.float32 and x.is_contiguous() and float(x.sum()) == 30
