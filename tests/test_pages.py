"""Memory that malloc keeps for the next step."""

import platform
import subprocess
import sys

import pytest

from unde.features.meter import Meter
from unde.pages import keep_pages

FAULTS = """
import resource, torch
from unde.pages import keep_pages

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(4):
        step = [torch.ones(2**18) for _ in range(24)]
        del step
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

first = faults()
keep_pages()
faults()
print(first, faults())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="of malloc in glibc")
def test_pages_that_a_step_gave_back_are_there_for_the_next():
    told = subprocess.run([sys.executable, "-c", FAULTS], capture_output=True, text=True, check=True)
    first, kept = map(int, told.stdout.split())
    assert first > 10_000 and kept < 500


def test_no_meter_sees_it():
    keep_pages.cache_clear()
    with Meter() as meter:
        keep_pages()
    assert meter.peak == 0 and keep_pages.cache_info().currsize == 1
