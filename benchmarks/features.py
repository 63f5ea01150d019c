"""Speed and memory of the feature pass, as ratios to a plain training pass of the same round, beside other libraries.

    python -m benchmarks run features               # all models; or features.gpt2

In every round, in an order of its own: the plain pass in batches as in training and in passes of the size that the
build settles, the frozen pass of that size, builds at ranks 16 and 64 in float32 and in int8 (writing included;
planning, which is paid once, apart), files of as many bytes written by nobody but the system, and the peers. Peak
memory is the high-water mark of a process of its own for each pass. Multiplications are counted, not timed.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from benchmarks.cases import CASES, SEED, Case, rows_of
from benchmarks.peaks import peaks
from benchmarks.peers import PEERS, host
from benchmarks.peers.host import Peer
from benchmarks.rounds import Failed, Run, Seconds, estimate, interleaved, ratio, seconds_of
from unde import Setup, bench
from unde.data import Rows
from unde.gradients import Unit, make_units, plan_coverage
from unde.gradients import feature_pass as passes
from unde.gradients.meter import Meter
from unde.methods import Method, TracIn

RANKS = (16, 64)
SMALL = 32  # examples of a small build
GOALS = {16: 0.10, 64: 0.25}  # overhead over the frozen floor, of a plain pass
MORE_MEMORY = 64 * 2**20  # bytes beyond the plain pass at the same batch
SELDOM = {"traker": 1, "kronfluence": 2}  # run in so many rounds at most: they take many times as long
ONE_BATCH = ("traker",)  # timed on one batch; all of its batches take the same


def measure(name: str, quick: bool = False, peers: bool = True, rounds: int | None = None) -> dict[str, Any]:
    case = CASES[name]
    rounds = rounds or (6 if quick else case.rounds)
    setup = case.setup()
    rows, small = rows_of(setup, case.examples), rows_of(setup, SMALL)
    settled: dict[int, Any] = {}
    runs: dict[str, Run] = {"plain": lambda: bench.passes(setup, rows, bench.plain_pass, case.batch)}
    for rank in RANKS:
        build_once(setup, rows, rank, settled)  # tells the size of its passes
        at = settled[rank]
        runs[f"build {rank}"] = lambda rank=rank: build_once(setup, rows, rank, settled)
        if not quick:
            runs[f"int8 {rank}"] = lambda rank=rank: build_once(setup, rows, rank, {}, "int8")
            runs[f"writing {rank}"] = writing(setup, rank, case.examples)
        for kind, run in (("plain", bench.plain_pass), ("frozen", bench.frozen_pass)):
            runs[f"{kind} {at.pass_size}/{at.rows}"] = lambda run=run, at=at: bench.passes(
                setup, rows, run, at.pass_size, at.rows
            )
    told: dict[str, dict[str, Any]] = {}
    errors: dict[str, str] = {}
    alive = {} if quick or not peers else host.start_all(PEERS, torch.get_num_threads(), errors)
    for peer, found in alive.items():
        try:
            told[peer] = found.ask("load", case=name, seed=SEED)
        except Failed as e:
            errors[peer] = str(e)
            continue
        for rank in RANKS:
            runs[f"{peer} {rank}"] = _of_peer(found, rank, case, told[peer])
    tell = (lambda line: None) if quick else lambda line: print(f"{name}: {line}", flush=True)
    seconds, failed = interleaved(runs, rounds, SEED, tell=tell)
    errors |= {peer: failed[f"{peer} {RANKS[0]}"] for peer in told if f"{peer} {RANKS[0]}" in failed}
    result = _told(case, seconds, settled)
    for rank, share in multiplications(case).items():
        result["ranks"][str(rank)]["multiplications"] = share
    if told or errors:
        result["peers"] = _of_peers(seconds, told, errors)
    if not quick:
        able = {peer: alive[peer] for peer in alive if peer not in errors and peer not in SELDOM}
        result["small"] = _small(setup, small, able)
        result["peak_bytes"] = peak_memory(name)
    return result


def build_once(
    setup: Setup, rows: Rows, rank: int, settled: dict[int, Any], store_dtype: str = "float32"
) -> dict[str, float]:
    begun = time.perf_counter()
    took = bench.build(
        setup,
        rows,
        TracIn(projection=f"kron({rank})"),
        lambda index: settled.update({rank: index.manifest.resolved}),
        store_dtype=store_dtype,
    )
    return {"": took, "planning": time.perf_counter() - begun - took}


def writing(setup: Setup, rank: int, examples: int) -> Callable[[], float]:
    """Seconds of writing as many bytes as features in float32 have, to a file in the same place as a build's."""
    width = _units(setup, rank)[-1].stop
    block = torch.randn(min(examples, max(1, 2**25 // (4 * width))), width).numpy().data.cast("B")

    def run() -> float:
        with tempfile.TemporaryFile(prefix="unde-bench-", buffering=0) as file:
            left, begun = 4 * width * examples, time.perf_counter()
            while left > 0:
                left -= file.write(block[:left])
            return time.perf_counter() - begun

    return run


def multiplications(case: Case) -> dict[int, float]:
    """Those of features beyond the frozen pass, as a share of those of the plain pass, by rank: of one batch."""
    setup, found = case.setup(), {}
    rows = rows_of(setup, case.batch)
    batch = rows.batch(range(case.batch))
    with Meter() as plain:
        bench.plain_pass(setup.model, setup.task, [batch])
    with Meter() as frozen:
        bench.frozen_pass(setup.model, setup.task, [batch])
    for rank in RANKS:
        units = _units(setup, rank)
        coverage = plan_coverage(setup.model, setup.task, rows, units, "loss")
        with (
            passes.FeaturePass(setup.model, setup.task, passes.Measurement(units), coverage) as run,
            Meter() as whole,
        ):
            run.collect(batch, range(case.batch))
        found[rank] = round((whole.flops - frozen.flops) / plain.flops, 4)
    return found


def _units(setup: Setup, rank: int) -> list[Unit]:
    names = [name for name, p in setup.model.named_parameters() if p.requires_grad]
    return make_units(setup.model, names, f"kron({rank})", SEED)


def _of_peer(peer: Peer, rank: int, case: Case, told: dict[str, Any]) -> Run:
    """A run of a peer; those that take long do not run in every round."""
    batch, examples = case.batch, case.examples
    times = [1 + SELDOM.get(peer.name, 10**6)]  # the first warms up

    def run() -> dict[str, float]:
        if times[0] == 0:
            return {"": math.nan, "planning": math.nan}
        times[0] -= 1
        asked = batch if peer.name in ONE_BATCH else examples
        answer = peer.ask("run", rank=rank, examples=asked)
        told.setdefault("numbers", {})[str(rank)] = answer["numbers"]
        return {"": answer["seconds"] * examples / asked, "planning": answer["planning"]}

    return run


def _told(case: Case, seconds: Seconds, settled: dict[int, Any]) -> dict[str, Any]:
    plain = np.array(seconds["plain"])
    result: dict[str, Any] = {
        "case": case.name,
        "batch": case.batch,
        "examples": case.examples,
        "rounds": len(plain),
        "plain": seconds_of(plain),
        "ranks": {},
    }
    for rank in RANKS:
        at = settled[rank]
        key = f"{at.pass_size}/{at.rows}"
        build, frozen, same = (
            np.array(seconds[n]) for n in (f"build {rank}", f"frozen {key}", f"plain {key}")
        )
        result["ranks"][str(rank)] = {
            "pass_size": at.pass_size,
            "rows": at.rows,
            "build": ratio(build, plain),
            "build to plain of its pass size": ratio(build, same),
            "frozen": ratio(frozen, plain),
            "plain of its pass size": ratio(same, plain),
            "overhead": estimate((build - frozen) / plain),
            "overhead of plain of its pass size": estimate((build - frozen) / same),
            "goal": GOALS[rank],
            "planning": seconds_of(seconds[f"build {rank}, planning"]),
            "planning to plain": ratio(seconds[f"build {rank}, planning"], plain),
            "seconds": [round(x, 6) for x in build],
        }
        if f"int8 {rank}" in seconds:
            small = np.array(seconds[f"int8 {rank}"])
            result["ranks"][str(rank)] |= {
                "int8": {"build": ratio(small, plain), "overhead": estimate((small - frozen) / plain)},
                "writing": ratio(seconds[f"writing {rank}"], plain),
            }
    result["plain_seconds"] = [round(x, 6) for x in plain]
    return result


def _of_peers(seconds: Seconds, told: dict[str, Any], errors: dict[str, str]) -> dict[str, Any]:
    plain, result = np.array(seconds["plain"]), {}
    for peer in PEERS:
        if peer in errors:
            result[peer] = {"error": errors[peer]}
            continue
        entry = dict(told[peer])
        for rank in RANKS:
            if f"{peer} {rank}" not in seconds:
                continue
            took, ours = np.array(seconds[f"{peer} {rank}"]), np.array(seconds[f"build {rank}"])
            entry[str(rank)] = {
                **ratio(took, plain),
                "to ours": ratio(took, ours),
                "to ours in int8": ratio(took, seconds[f"int8 {rank}"]),
                "planning": seconds_of(seconds[f"{peer} {rank}, planning"]),
                "rounds": int(np.isfinite(took).sum()),
            }
        result[peer] = entry
    return result


def _small(setup: Setup, rows: Rows, peers: dict[str, Peer]) -> dict[str, Any]:
    """Seconds of whole builds of a few examples at the smaller rank, planning included."""
    few: dict[str, Run] = {"ours": lambda: sum(build_once(setup, rows, RANKS[0], {}).values())}
    for name, peer in peers.items():

        def run(peer: Peer = peer) -> float:
            answer = peer.ask("run", rank=RANKS[0], examples=SMALL)
            return answer["seconds"] + answer["planning"]

        few[name] = run
    seconds, _ = interleaved(few, 6, SEED)
    return {"examples": SMALL, "rank": RANKS[0], **{name: seconds_of(s) for name, s in seconds.items()}}


def peak_memory(case: str) -> dict[str, int]:
    """Bytes that one pass adds to the peak of a process."""
    jobs = [("plain", 16), ("build", 16), ("build", 64), ("build at batch", 16), ("build at batch", 64)]
    found = peaks([("benchmarks.features:one_pass", case, *job) for job in jobs])
    return {what if what == "plain" else f"{what}, rank {rank}": n for (what, rank), n in zip(jobs, found)}


def one_pass(name: str, what: str, rank: int) -> Callable[[], float]:
    if what == "build at batch":  # its passes as large as those of training
        passes.LEAST = passes.MOST = CASES[name].batch
    return pass_of(name, None if what == "plain" else TracIn(projection=f"kron({rank})"))


def pass_of(name: str, method: Method | None) -> Callable[[], float]:
    """A build under a method, or the plain pass, of a process that has its libraries loaded."""
    case = CASES[name]
    setup = case.setup()
    rows = rows_of(setup, case.examples)
    bench.passes(setup, rows_of(setup, 1), bench.frozen_pass, 1)
    if method is None:
        return lambda: bench.passes(setup, rows, bench.plain_pass, case.batch)
    return lambda: bench.build(setup, rows, method)
