"""The one progress bar, on a terminal and in a log, by a clock that the tests turn; sizes and times for people."""

import io
from types import SimpleNamespace

import pytest
from rich.console import Console

from unde import console


@pytest.fixture
def clock(monkeypatch):
    made = SimpleNamespace(now=1000.0, monotonic=lambda: made.now)
    monkeypatch.setattr(console, "time", made)
    return made


@pytest.fixture
def screen(monkeypatch, clock):
    """A terminal of 100 columns."""
    file = io.StringIO()
    monkeypatch.setattr(console, "_err", Console(file=file, force_terminal=True, width=100))
    return file


@pytest.fixture
def log(monkeypatch, clock):
    """A file."""
    file = io.StringIO()
    monkeypatch.setattr(console, "_err", Console(file=file, width=40))  # lines in a log are not wrapped
    return file


def work(clock, seconds, *, total=10, count=1, ends_with=None, **options):
    with console.progress("retraining", total, **options) as advance:
        for step in seconds:
            clock.now += step
            advance(count)
        if ends_with is not None:
            raise ends_with


def test_a_log_gets_lines_with_count_rate_and_time_left(clock, log):
    work(clock, (20, 20, 20), unit="models", done=4)
    assert log.getvalue().splitlines() == [
        "retraining: 6/10, 3.0 models/min, 80 s left",  # at 40 s; the next is due at 70 s
        "retraining: 3 models in 60 s, 3.0 models/min",  # at the end
    ]


def test_a_log_gets_a_line_every_half_a_minute(clock, log):
    with console.progress("features", 50_000) as advance:
        for _ in range(100):
            clock.now += 1
            advance(128)
    lines = log.getvalue().splitlines()
    assert lines[0] == "features: 3,840/50,000, 128.0 examples/s, 6 min left"
    assert lines[-1] == "features: 12,800 examples in 2 min, 128.0 examples/s"
    assert len(lines) == 3 + 1


def test_a_log_says_nothing_of_short_jobs(clock, log):
    work(clock, (9, 9, 9))
    assert log.getvalue() == ""


def test_a_terminal_shows_nothing_of_short_jobs(clock, screen):
    work(clock, (0.9, 0.9, 0.9))
    assert screen.getvalue() == ""


def test_a_bar_appears_once_patience_ends_and_counts_what_came_before(clock, screen):
    with console.progress("tail-patch[x]", 1200, unit="queries") as advance:
        clock.now += 2
        advance(100)
        assert screen.getvalue() == ""
        clock.now += 2
        advance(1000)
        assert console._busy
    shown = screen.getvalue()
    assert "tail-patch[x]" in shown and "1,100/1,200, 275.0 queries/s, 1 s left" in shown
    assert "tail-patch[x]: " not in shown  # lines are for logs, and for what took long


def test_a_long_job_leaves_a_line_on_a_terminal_too(clock, screen):
    work(clock, (30, 60), unit="models")
    assert screen.getvalue().rstrip().endswith("retraining: 2 models in 2 min, 1.3 models/min")


def test_only_the_outer_job_is_shown(clock, log):
    with console.progress("outer", 2) as outer:
        with console.progress("inner", 1) as inner:
            clock.now += 40
            inner(1)
        outer(1)
    with pytest.raises(KeyError), console.progress("failed", 1):
        raise KeyError
    with console.progress("next", 1) as advance:
        clock.now += 40
        advance(1)
    assert [line.partition(":")[0] for line in log.getvalue().splitlines()] == ["outer"] * 2 + ["next"] * 2


def test_a_job_that_is_not_shown_hides_none(clock, log):
    with console.progress("quiet", 2, show=False, estimate="things") as quiet:
        clock.now += 40
        quiet(1)
        work(clock, (40,))
    assert {line.partition(":")[0] for line in log.getvalue().splitlines()} == {"retraining"}


def test_a_job_that_fails_has_no_last_line(clock, log):
    with pytest.raises(KeyError):
        work(clock, (20, 20), ends_with=KeyError)
    assert log.getvalue().splitlines() == ["retraining: 2/10, 3.0 examples/min, 3 min left"]


@pytest.mark.parametrize("kind", ["screen", "log"])
def test_an_interrupt_carries_how_far_the_job_got(clock, kind, request):
    request.getfixturevalue(kind)
    with pytest.raises(KeyboardInterrupt) as stop:
        work(clock, (5, 5), total=50_000, count=6144, ends_with=KeyboardInterrupt)
    assert str(stop.value) == "after 12,288 of 50,000 examples"
    assert not console._busy


def test_the_time_left_agrees_with_the_estimate(clock, log):
    """The first step loads and checks: 100 s, then 2 s for each."""
    work(clock, (100, 2, 2, 2, 32), estimate="examples")
    lines = log.getvalue().splitlines()
    assert lines[0] == "retraining: 1/10, 36.0 examples/h, 15 min left"  # nothing else is known yet
    assert lines[1] == "  about 20 s for 10 examples"
    assert lines[2].endswith(", 48 s left")  # 4 examples in 38 s after the first: 5 are left


def test_nothing_done_has_no_time_left(clock, log):
    work(clock, (31,), count=0)
    assert log.getvalue().splitlines()[0] == "retraining: 0/10, 0.0 examples/h"


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        ((60.0, 2.0, 2.0, 2.0, 50.0), "about 3 min"),  # 2 s for 10, whatever came before and after
        ((60, 60), "about 1 h 40 min"),
    ],
)
def test_an_estimate_does_not_count_the_first_step_nor_wait_for_slow_ones(clock, log, steps, said):
    with console.progress("", 1000, estimate="things") as advance:
        for seconds in steps:
            clock.now += seconds
            advance(10)
    lines = log.getvalue().splitlines()
    assert [line for line in lines if "about" in line] == [f"  {said} for 1,000 things"]
    assert lines[0].startswith(": 10/1,000, 10.0 things/min, ")


@pytest.mark.parametrize(
    ("count", "seconds", "told"),
    [
        (10, 5.0, "2.0 models/s"),
        (5000, 2.0, "2,500.0 models/s"),
        (1, 40.0, "1.5 models/min"),
        (1, 60.0, "1.0 models/min"),
        (3, 7200.0, "1.5 models/h"),
    ],
)
def test_rates(count, seconds, told):
    assert console.rate(count, seconds, "models") == told


def test_sizes_for_people():
    sizes = [console.size(x) for x in (5, 1500, 2.5e6, 7e9, 3e12)]
    assert sizes == ["5 B", "1.5 kB", "2.5 MB", "7 GB", "3 TB"]
    times = [console.duration(s) for s in (0.1, 89, 91, 3599, 5401)]
    assert times == ["1 s", "89 s", "2 min", "60 min", "1 h 30 min"]
