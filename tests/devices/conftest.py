"""The device that these tests run on: `UNDE_TEST_DEVICE`, or the pretended one."""

import itertools
import os

import pretended_device
import pytest
import torch


@pytest.fixture(scope="session")
def device():
    name = os.environ.get("UNDE_TEST_DEVICE") or pretended_device.NAME
    if name != pretended_device.NAME:
        return name
    if not hasattr(torch.utils.backend_registration, "_setup_privateuseone_for_python_backend"):
        pytest.skip("this torch cannot make a device in Python")
    pretended_device.register()
    return name


@pytest.fixture(autouse=True)
def one_thread():
    """Gradients in this thread: those of devices begin with the first gradient of a process, maybe without this one."""
    with torch.autograd.set_multithreading_enabled(False):
        yield


@pytest.fixture
def pretended(device):
    """The pretended device with its counts at zero."""
    if device != pretended_device.NAME:
        pytest.skip(f"nothing is counted on {device}")
    for here in pretended_device.counts:
        here.restart()
    return pretended_device


@pytest.fixture
def operations(device):
    """Operations on the pretended device since the test began, or another count; on devices that do not count, more
    each time."""
    for here in pretended_device.counts:
        here.restart()
    more = itertools.count(10**6, 10**6)

    def count(index=0, what="operations"):
        return (
            getattr(pretended_device.counts[index], what) if device == pretended_device.NAME else next(more)
        )

    return count
