"""The fault campaign, short: nothing raw, nothing wrong, nothing lost. And it can tell."""

import json
import random
import time

import pytest
from benchmarks.faults import __main__ as faults
from benchmarks.faults import damage, trial

from unde import UndeError


def test_the_campaign_finds_nothing(tmp_path):
    tally = faults.campaign(faults.SHORT, seed=1, folder=tmp_path, say=False)
    assert tally.bad == 0, "\n".join(tally.examples)
    counts = {category: sum(count.values()) for category, count in tally.counts.items()}
    assert counts["damaged files"] == 120 and counts["hostile manifests"] == 30 and counts["full disks"] == 12
    assert (
        counts["kills"] >= 6 and counts["bad inputs, Python"] > 20 and counts["bad inputs, command line"] > 10
    )
    found = sum(tally.counts.values(), start=type(tally.counts["kills"])())
    assert found[trial.CLEAR] > 100 and found[trial.RIGHT] > 30


def test_it_would_find_scores_that_are_wrong(tmp_path, monkeypatch):
    """Without checksums a flipped bit goes through."""
    monkeypatch.setattr("unde.store.shards.checksum", lambda tensors, of=None: "0")
    tally = trial.Tally()
    damage.run(tally, tmp_path, random.Random(0), 200)
    assert tally.counts[damage.CATEGORY][trial.WRONG] > 0 and tally.examples


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (UndeError("a sentence"), trial.CLEAR),
        (UndeError(""), trial.RAW),
        (SystemExit(2), trial.CLEAR),
        (SystemExit(70), trial.RAW),
        (OSError(28, "No space left on device"), trial.RAW),
        (RecursionError(), trial.RAW),
    ],
)
def test_outcomes(error, outcome):
    def run():
        raise error

    assert trial.tried(run)[0] == outcome


def test_results_are_right_or_wrong_and_hangs_end(monkeypatch):
    assert trial.tried(lambda: True)[0] == trial.RIGHT
    assert trial.tried(lambda: False)[0] == trial.WRONG
    monkeypatch.setattr(trial.in_time.__wrapped__, "__defaults__", (1,))
    outcome, why = trial.tried(lambda: time.sleep(30))
    assert outcome == trial.RAW and why == "it hangs"


def test_the_page_shows_the_results_that_are_kept():
    results = json.loads(faults.RESULTS.read_text())
    assert faults.rendered(results) in faults.PAGE.read_text()
    assert results["counts"]["damaged files"]["clear error"] > 5000
    assert not any(count.get(bad, 0) for count in results["counts"].values() for bad in trial.BAD)
