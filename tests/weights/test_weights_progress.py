from contextlib import contextmanager

import pytest

from unde import console
from unde.weights import progress as module
from unde.weights.progress import progress


@pytest.fixture
def drawn(monkeypatch):
    """What was drawn: (title, total, steps)."""
    record = []

    @contextmanager
    def bar(title, total):
        steps = []
        record.append((title, total, steps))
        yield steps.append

    monkeypatch.setattr(console, "progress", bar)
    return record


def test_short_waits_show_nothing(drawn):
    with progress("short", 2) as advance:
        advance(2)
    assert drawn == []


def test_long_waits_show_all_steps(drawn, monkeypatch):
    monkeypatch.setattr(module, "_PATIENCE", 1e9)
    with progress("long", 5) as advance:
        advance(2)
        monkeypatch.setattr(module, "_PATIENCE", -1.0)
        advance(1)
        advance(2)
    assert drawn == [("long", 5, [3, 2])]


def test_only_the_outer_bar_is_drawn(drawn, monkeypatch):
    monkeypatch.setattr(module, "_PATIENCE", -1.0)
    with progress("outer", 1) as outer:
        with progress("inner", 1) as inner:
            inner(1)
        outer(1)
    with pytest.raises(KeyError), progress("failed", 1):
        raise KeyError
    with progress("next", 1) as advance:
        advance(1)
    assert [title for title, _, _ in drawn] == ["outer", "next"]
