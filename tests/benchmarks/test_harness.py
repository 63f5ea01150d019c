"""The harness of benchmarks: turns, ratios and their intervals, what got worse, peers that fail, and the page."""

import io
import json
import math
import os
import tempfile
import threading
from itertools import count
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from benchmarks.cases import Case
from benchmarks.compare import Change, Estimate, compare, ratios
from benchmarks.machine import machine, same_processor
from benchmarks.peers import host, worker
from scipy import stats
from torch import nn

from benchmarks import __main__ as command
from benchmarks import features, growth, registry, rounds
from unde import Setup
from unde.bench import median_interval
from unde.tasks import Classification


@pytest.mark.parametrize("n", [1, 5, 6, 9, 15, 40])
def test_an_interval_of_the_median_holds_as_often_as_the_binomial_says(n):
    low, high = median_interval(range(1, n + 1))
    assert low + high == n + 1  # as far from either end

    def holds(left_out):  # P(more than left_out values on each side of the median)
        return 1 - 2 * stats.binom.cdf(left_out, n, 0.5)

    left_out = int(low) - 1
    assert holds(left_out) >= 0.95 or left_out == 0
    assert holds(left_out + 1) < 0.95  # and no narrower one would do


def test_intervals_cover_the_median_of_a_skewed_distribution():
    draw = np.random.default_rng(0)
    inside = [low <= 1.0 <= high for low, high in map(median_interval, draw.lognormal(0, 1, (4000, 9)))]
    assert np.mean(inside) == pytest.approx(1 - 2 * stats.binom.cdf(1, 9, 0.5), abs=0.012)


def test_ratios_are_of_the_same_round():
    noise = np.array([1.0, 5.0, 2.0, 9.0, 1.0, 3.0, 1.5])  # of the machine, which hits both
    found = rounds.ratio(0.8 * noise, noise)
    assert found == {"ratio": 0.8, "interval95": [0.8, 0.8]}
    skipped = rounds.ratio([1.0, math.nan, 3.0], [2.0, 2.0, 2.0])
    assert skipped == {"ratio": 1.0, "interval95": [0.5, 1.5]}


def test_every_round_has_every_run_in_an_order_of_its_own():
    seen = []
    runs = {name: lambda name=name: seen.append(name) for name in "abcd"}
    seconds, failed = rounds.interleaved(runs, 20, seed=3)
    turns = [seen[i : i + 4] for i in range(0, len(seen), 4)]
    assert len(turns) == 21 and all(sorted(turn) == list("abcd") for turn in turns)
    assert len({tuple(turn) for turn in turns}) > 8
    assert {name: len(s) for name, s in seconds.items()} == dict.fromkeys("abcd", 20) and not failed
    again, seen[:] = turns, []
    rounds.interleaved(runs, 20, seed=3)
    assert [seen[i : i + 4] for i in range(0, len(seen), 4)] == again


def test_what_fails_is_left_out_and_the_rest_goes_on():
    number = count()

    def breaks():
        if next(number) == 2:
            raise rounds.Failed("no such layer")
        return {"": 1.0, "planning": 0.5}

    seconds, failed = rounds.interleaved({"good": lambda: 2.0, "bad": breaks}, 4)
    assert failed == {"bad": "no such layer"} and seconds == {"good": [2.0] * 4}
    assert next(number) == 3


ONE = {"ratio": 0.6, "interval95": [0.58, 0.62]}


def test_only_what_leaves_the_interval_and_matters_is_worse():
    def change(ratio, low, high, **more):
        return compare({"a": ONE | more}, {"a": {"ratio": ratio, "interval95": [low, high]} | more})[0]

    assert change(0.7, 0.66, 0.74).worse
    assert not change(0.7, 0.61, 0.74).worse  # intervals meet
    assert not change(0.625, 0.621, 0.63).worse  # nobody would notice
    assert change(0.5, 0.48, 0.52).better and not change(0.5, 0.48, 0.52).worse
    assert change(0.5, 0.48, 0.52, better="higher").worse
    assert "got worse: 0.70 [0.66, 0.74], stored is 0.60 [0.58, 0.62]" in str(change(0.7, 0.66, 0.74))


def test_ratios_are_found_wherever_they_are_but_not_those_of_peers():
    found = {
        "ranks": {"16": {"build": ONE, "planning": {"seconds": 1.0, "interval95": [1, 1]}}},
        "peers": {"other": {"16": ONE}},
        "rows": [
            {"codec": "int8", "examples": 5, "speed": ONE},
            {"codec": "int4", "examples": 5, "speed": ONE},
        ],
    }
    names = [name for name, _ in ratios(found)]
    assert names == [
        "ranks, 16, build",
        "rows, codec int8 examples 5, speed",
        "rows, codec int4 examples 5, speed",
    ]
    fewer = {"rows": found["rows"][1:]}
    assert [c.name for c in compare(found, fewer)] == names[2:]


@pytest.fixture
def one_benchmark(tmp_path, monkeypatch):
    """A benchmark whose stored ratio is 0.6, and which finds what it is told to, one after the other."""
    monkeypatch.setattr(registry, "RESULTS", tmp_path)
    monkeypatch.setattr(registry, "CHECKED", ("toy",))
    finds = []
    toy = registry.Benchmark("toy", "a toy", lambda quick: {"build": finds.pop(0) if quick else ONE})
    monkeypatch.setattr(registry, "benchmarks", lambda: {"toy": toy})
    assert command.main(["run", "all"]) == 0
    return finds


WORSE = {"ratio": 0.9, "interval95": [0.85, 0.95]}


def test_check_fails_on_what_is_worse_twice(one_benchmark, capsys):
    one_benchmark += [WORSE, WORSE]
    assert command.main(["check"]) == 1
    said = capsys.readouterr().out
    assert "1 of 1 ratios got worse" in said and "build got worse: 0.90" in said
    one_benchmark += [WORSE, ONE]  # noise
    assert command.main(["check"]) == 0
    one_benchmark += [ONE]
    assert command.main(["check"]) == 0
    assert "no ratio got worse (1 compared" in capsys.readouterr().out


def test_check_warns_of_another_processor(one_benchmark, capsys, tmp_path):
    stored = json.loads((tmp_path / "toy.json").read_text())
    stored["provenance"]["machine"]["processor"] = "Another One"
    (tmp_path / "toy.json").write_text(json.dumps(stored))
    one_benchmark += [ONE]
    assert command.main(["check"]) == 0
    assert "warning: results are of Another One" in capsys.readouterr().out


def test_results_are_kept_whole_and_resumed(one_benchmark, capsys, tmp_path):
    kept = json.loads((tmp_path / "toy.json").read_text())
    assert kept["build"] == ONE and kept["provenance"]["seed"] == 0
    assert registry.load("toy")["found"] == {"build": ONE}
    assert kept["provenance"]["machine"]["threads"] >= 1 and kept["provenance"]["versions"]["torch"]
    assert [p.name for p in tmp_path.iterdir()] == ["toy.json"]
    assert command.main(["run", "toy", "--resume"]) == 0
    assert "measured already" in capsys.readouterr().out
    assert command.main(["run", "tyo"]) == 2
    assert "Did you mean 'toy'" in capsys.readouterr().err


def test_a_benchmark_that_breaks_does_not_stop_the_others(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(registry, "RESULTS", tmp_path)
    made = {
        "bad": registry.Benchmark("bad", "", lambda quick: 1 / 0),
        "good": registry.Benchmark("good", "", lambda quick: {}),
    }
    monkeypatch.setattr(registry, "benchmarks", lambda: made)
    assert command.main(["run", "all"]) == 1
    assert [p.name for p in tmp_path.iterdir()] == ["good.json"]
    assert "failed: bad" in capsys.readouterr().err


def test_all_registered_benchmarks_are_there():
    there = registry.benchmarks()
    assert {"features.resnet", "features.lora", "language", "queries", "growth"} <= set(there)
    assert [b.name for b in registry.chosen(["features"])] == [n for n in there if n.startswith("features.")]
    assert all(b.about for b in there.values())


def test_a_processor_is_named_with_its_instruction_sets():
    flags = "flags : fpu avx2 avx512f amx_tile"
    text = (
        f"model name : Some CPU\ncpu family : 6\nmodel : 207\nstepping : 2\n{flags}\n\nmodel name : Other\n"
    )
    found = machine(text)
    assert found["processor"] == "Some CPU" and found["sets"] == ["AVX2", "AVX-512", "AMX"]
    assert found["family"] == "6 207 2"
    assert same_processor(found, dict(found)) and not same_processor(found, found | {"threads": 99})


class Pipes:
    """A peer in a thread of this process, behind the pipes that a process of its own would have."""

    def __init__(self, serve):
        to_peer, from_peer = os.pipe(), os.pipe()
        self.stdin, self.stdout = os.fdopen(to_peer[1], "wb"), os.fdopen(from_peer[0], "rb")

        def run():
            with os.fdopen(to_peer[0]) as requests, os.fdopen(from_peer[1], "w") as answers:
                serve(requests, answers)

        self.thread = threading.Thread(target=run, daemon=True)
        self.thread.start()

    def kill(self): ...

    def wait(self, timeout=None):
        return 0


def fake(run):
    return SimpleNamespace(__name__="benchmarks.peers.fake", NOTE="a fake", run=run)


def toy():
    return Setup(nn.Linear(3, 2), Classification(), (torch.randn(5, 3), torch.zeros(5).long()))


def test_a_peer_answers_and_its_errors_are_one_line(monkeypatch):
    monkeypatch.setitem(worker.CASES, "toy", Case("toy", "a toy", toy, 32, 1, 1))

    def run(given):
        assert given.case.name == "toy" and given.folder.is_dir()
        if given.rank == 64:
            raise RuntimeError("expected [N, S, I]\nand much more")
        batches = list(given.batches())
        assert [len(b) for b in batches] == [20] and len(given.rows) >= 20
        return {"seconds": 1.5, "planning": 0.25, "numbers": given.rank**2}

    peer = host.Peer("fake", Pipes(lambda requests, answers: worker.serve(fake(run), requests, answers)))
    with pytest.raises(rounds.Failed, match=r"^AssertionError: nothing is loaded$"):
        peer.ask("run", rank=16, examples=20)
    assert peer.ask("load", case="toy", seed=0) == {"note": "a fake", "version": ""}
    assert peer.ask("run", rank=16, examples=20) == {"seconds": 1.5, "planning": 0.25, "numbers": 256}
    with pytest.raises(rounds.Failed, match=r"^RuntimeError: expected \[N, S, I\]$"):
        peer.ask("run", rank=64, examples=20)
    assert peer.ask("run", rank=16, examples=20)["numbers"] == 256  # it goes on
    peer.close()


def test_features_and_peers_of_the_same_rounds(monkeypatch):
    monkeypatch.setitem(features.CASES, "toy", Case("toy", "a toy", toy, 8, 2, 1))
    monkeypatch.setattr(features, "PEERS", {"twice": "", "broken": "", "absent": ""})
    monkeypatch.setattr(features, "peak_memory", lambda name: {"plain": 1})
    monkeypatch.setattr(features, "_small", lambda setup, rows, peers: sorted(peers))
    asked = []

    class Fake:
        def __init__(self, name):
            self.name, self.ended = name, False

        def ask(self, do, **given):
            asked.append((self.name, do))
            if do == "load":
                return {"note": "n", "version": "1"}
            if self.name == "broken":
                raise rounds.Failed("TypeError: no")
            return {"seconds": 2.0, "planning": 1.0, "numbers": given["rank"] ** 2}

        def close(self):
            asked.append((self.name, "close"))

    def start(name, threads):
        if name == "absent":
            raise rounds.Failed("no environment: offline")
        return Fake(name)

    monkeypatch.setattr(host, "start", start)
    monkeypatch.setattr(host, "_alive", {})
    found = features.measure("toy", rounds=3)
    assert found["peers"]["broken"] == {"error": "TypeError: no"}
    assert found["peers"]["absent"] == {"error": "no environment: offline"}
    peer = found["peers"]["twice"]
    assert peer["numbers"] == {"16": 256, "64": 4096} and peer["16"]["planning"]["seconds"] == 1.0
    assert peer["16"]["ratio"] == pytest.approx(np.median(2.0 / np.array(found["plain_seconds"])), rel=0.01)
    ours = found["ranks"]["64"]
    assert ours["build"]["ratio"] == pytest.approx(
        np.median(np.array(ours["seconds"]) / found["plain_seconds"]), rel=0.1
    )
    assert ours["pass_size"] == 16 and found["small"] == ["twice"]
    assert ours["writing"]["ratio"] > 0 and ours["multiplications"] == pytest.approx(
        0.5
    )  # forward, and one backward
    assert asked.count(("twice", "run")) == 8 and list(host._alive) == ["twice", "broken"]
    host.close_all()
    assert {("twice", "close"), ("broken", "close")} <= set(asked) and not host._alive
    assert asked.count(("broken", "run")) == 2  # once at each rank
    json.dumps(found)


def test_multiplications_of_features():
    """Of both layers: inputs and output gradients that are longer than the rank are projected, then multiplied."""

    def two_layers():
        model = nn.Sequential(nn.Linear(100, 80), nn.Linear(80, 10))
        return Setup(model, Classification(), (torch.randn(5, 100), torch.zeros(5).long()))

    found = features.multiplications(Case("two", "two layers", two_layers, 4, 1, 1))
    plain = 2 * 100 * 80 + 3 * 80 * 10  # no gradient of the data
    for rank in (16, 64):
        last = 80 * rank + 10 * rank if 10 * 80 > rank * rank else 10 * 80  # so few entries are not projected
        more = (100 + 80) * rank + rank * rank + last
        assert found[rank] == pytest.approx(more / plain, abs=1e-4)


def test_writing_has_the_bytes_of_features(monkeypatch):
    sizes, real = [], tempfile.TemporaryFile

    def noted(**given):
        file = real(**given)
        sizes.append(file)
        return file

    monkeypatch.setattr(features.tempfile, "TemporaryFile", noted)
    monkeypatch.setattr(
        features.time, "perf_counter", lambda: sizes[-1].tell() if sizes and not sizes[-1].closed else 0
    )
    assert features.writing(toy(), 16, 700)() == 4 * 700 * (3 * 2 + 2)


def test_a_peer_that_ends_or_does_not_answer_has_failed():
    ends = host.Peer("fake", Pipes(lambda requests, answers: requests.readline()))
    with pytest.raises(rounds.Failed, match="its process ended"):
        ends.ask("load", case="resnet")
    late = threading.Event()
    slow = host.Peer("fake", Pipes(lambda requests, answers: late.wait(5)), patience=0.05)
    with pytest.raises(rounds.Failed, match="no answer within 0 s"):
        slow.ask("load", case="resnet")
    late.set()
    assert ends.ended and slow.ended
    with pytest.raises(rounds.Failed, match="its process ended"):
        slow.ask("load", case="resnet")


def test_long_errors_are_cut():
    answers = io.StringIO()
    worker.serve(fake(None), ['{"do": "load", "case": "nothing"}\n'], answers)
    assert json.loads(answers.getvalue()) == {"error": "KeyError: 'nothing'"}
    assert len(worker.one_line(ValueError("x" * 500))) == 160


def test_exponents():
    values = {size: [1e-3 * size**1.5 * noise for noise in (1, 2, 1.1)] for size in (2, 8, 32)}
    found = growth.fitted(values)
    assert found["exponent"] == 1.5 and found["interval95"] == [
        1.5,
        1.5,
    ]  # noise of a round hits all its sizes
    assert found["seconds"] == pytest.approx([1.1e-3 * size**1.5 for size in (2, 8, 32)], abs=1e-6)


def test_change_of_nothing_is_no_change():
    same = Estimate(0.5, 0.4, 0.6)
    assert "is as it was" in str(Change("a", same, same))
