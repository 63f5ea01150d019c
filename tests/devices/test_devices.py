"""What is asked of a device: the pretended one answers as real backends do."""

from contextlib import nullcontext
from typing import ClassVar

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


class FakeStream:
    """A stream that notes what is asked of it."""

    log: ClassVar[list[str]] = []

    def __init__(self, device):
        self.device = device

    def record_event(self):
        self.log.append("copied")
        return len(self.log)

    def wait_event(self, event):
        self.log.append(f"wait for {self.log[event - 1]} at {event}")


def test_the_next_batch_goes_up_while_the_last_is_used(pretended, monkeypatch):
    module, device = torch.pretended, torch.device("pretended:0")
    batches = [(slice(i, i + 1), [{"features": torch.full((2,), float(i))}]) for i in range(3)]
    assert [rows.start for rows, _ in devices.upload(batches, devices.CPU)] == [0, 1, 2]
    seen = []
    for rows, [part] in devices.upload(batches, device):
        seen.append((rows.start, pretended.counts[0].up, part["features"].tolist()))
    assert seen == [(0, 2, [0.0, 0.0]), (1, 3, [1.0, 1.0]), (2, 3, [2.0, 2.0])]

    monkeypatch.setattr(FakeStream, "log", log := [])
    monkeypatch.setattr(module, "Stream", FakeStream, raising=False)
    monkeypatch.setattr(module, "stream", lambda side: nullcontext(), raising=False)
    monkeypatch.setattr(module, "current_stream", FakeStream, raising=False)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda x: log.append("pinned") or x)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda x, stream: log.append("kept"))
    for rows, _ in devices.upload(batches, device):
        log.append(f"used {rows.start}")
    up = ["pinned", "copied"]
    assert log == [
        *up, *up, "wait for copied at 2", "kept", "used 0",
        *up, "wait for copied at 4", "kept", "used 1", "wait for copied at 9", "kept", "used 2",
    ]  # fmt: skip
