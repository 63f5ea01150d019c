"""What is asked of a device: the pretended one answers as real backends do."""

import pytest
import torch
from torch import nn

from unde import UndeError, devices


def test_find_device_names_what_is_there(pretended):
    assert devices.find_device("pretended:1").index == 1
    for name in ("pretended:7", "nowhere"):
        with pytest.raises(UndeError, match=f"device '{name}'.*cpu, pretended:0, pretended:1"):
            devices.find_device(name)


def test_a_device_without_memory_is_named(pretended):
    device = torch.device("pretended:0")
    with pretended.limited(0), pytest.raises(UndeError, match="no memory is left on pretended:0"):
        devices.find_device(device)
    with pretended.limited(0), pytest.raises(UndeError, match="no memory is left"):
        devices.budget(device, 1000)


def test_the_budget_is_a_share_of_what_is_free(pretended):
    device = torch.device("pretended:0")
    with pretended.limited(1000):
        assert devices.free_memory(device) == 1000
        assert devices.budget(device, 5) == devices.Compute(device, 800)
        assert devices.budget(device, 5, sharing=4).memory == 200
        assert devices.budget(device, 5, 90).memory == 90
    assert devices.budget(torch.device("cpu"), 5, 90).memory == 5


def test_float64_is_computed_where_it_can_be(pretended):
    device = torch.device("pretended:0")
    assert devices.double_device(device) == devices.CPU
    with pretended.with_float64():
        assert devices.double_device(device) == device


def test_random_numbers_of_the_device_are_restored(pretended):
    states = devices.random_states()
    assert [state[:2] for state in states] == [("pretended", 0), ("pretended", 1)]
    devices.set_random_states(states)


def test_float32_is_exact_inside():
    def read():
        return torch.backends.cudnn.enabled, torch.backends.cuda.matmul.allow_tf32

    before = read()
    try:
        torch.backends.cuda.matmul.allow_tf32 = True
        with devices.exact_float32():
            assert read() == (False, False)
        assert read() == (before[0], True)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before[1]


def test_a_parameter_that_is_nowhere_is_named():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    with pytest.raises(UndeError, match=r"'1.weight' is not in memory"):
        devices.device_of(model)
