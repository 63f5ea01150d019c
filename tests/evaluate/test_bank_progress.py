import pytest

from unde.evaluate import progress


def test_a_log_file_gets_lines_with_count_rate_and_time_left(monkeypatch, capsys):
    clock = iter([0.0, 20.0, 40.0, 60.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    with progress.ModelProgress("retraining", total=10, done=4) as bar:
        for _ in range(3):
            bar.step()
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["retraining: 6/10, 3.0 models/min, 80 s left"]  # at 40 s; the next is due at 70 s


@pytest.mark.parametrize(
    ("finished", "left", "seconds", "told"),
    [
        (10, 5, 5.0, "2.0 models/s, 2 s left"),
        (1, 63, 40.0, "1.5 models/min, 42 min left"),
        (1, 200, 60.0, "1.0 models/min, 3.3 h left"),
    ],
)
def test_pace(finished, left, seconds, told):
    assert progress.pace(finished, left, seconds) == told
