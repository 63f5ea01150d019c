"""What a build costs that does not grow with its examples, and what a query costs on an index that was just opened.

    python benchmarks/fixed.py                        # prints the table, writes benchmarks/results/fixed.json
    python benchmarks/fixed.py --against PATH         # beside the package in another src folder, in the same run
    python benchmarks/fixed.py --quick

The GPT-2 and the ResNet-18 of benchmarks/features.py. Indexes of several lengths are built in turn, always with passes
of the same size; the fixed cost is where the line through their times meets no examples at all (`intercept`), the
median of several rounds. `direct` is the time of a build apart from that of its features, as the build itself logs it.
Every package has a process of its own, and builds take turns, so that noise of the machine hits all alike.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

RESULTS = Path(__file__).parent / "results" / "fixed.json"
BATCH = {"gpt2": 8, "resnet": 32}
COUNTS = {"gpt2": (8, 16, 24, 32), "resnet": (32, 64, 128, 256)}
GOALS = {"gpt2": 0.3, "resnet": 0.2}  # seconds
RANKS = (16, 64)


def model_and_data(case: str) -> tuple[Any, Any, Any]:
    """A model, its task, and as many examples as the largest index has."""
    from transformers import GPT2Config, GPT2LMHeadModel, ResNetConfig, ResNetForImageClassification

    from unde.tasks import CausalLM, Classification

    torch.manual_seed(0)
    if case == "gpt2":
        size = {"n_layer": 6, "n_embd": 256, "n_head": 8, "n_positions": 256, "vocab_size": 8192}
        model = GPT2LMHeadModel(GPT2Config(**size, bos_token_id=0, eos_token_id=0))
        return model, CausalLM(), {"input_ids": torch.randint(0, 8192, (max(COUNTS[case]), 256))}
    widths = {"hidden_sizes": [64, 128, 256, 512], "depths": [2, 2, 2, 2]}
    resnet = ResNetForImageClassification(ResNetConfig(**widths, layer_type="basic", num_labels=10))
    images = torch.randn(max(COUNTS[case]), 3, 32, 32)
    return resnet, Classification(), (images, torch.randint(0, 10, (len(images),)))


def first(data: Any, n: int) -> Any:
    return {k: x[:n] for k, x in data.items()} if isinstance(data, dict) else tuple(x[:n] for x in data)


def timed(run: Callable[..., Any], *given: Any, **named: Any) -> tuple[float, Any]:
    begun = time.perf_counter()
    made = run(*given, **named)
    return time.perf_counter() - begun, made


def work() -> None:
    """One package in a process of its own: [case, rank, n] on a line of its input, seconds on one of its output."""
    from unde import Index, bench
    from unde.methods import TracIn

    made: dict[str, Any] = {}
    for line in sys.stdin:
        case, rank, n, queries = json.loads(line)
        if case not in made:
            made[case] = model_and_data(case)
        model, task, data = made[case]
        method = TracIn(projection=f"kron({rank})")
        with (
            tempfile.TemporaryDirectory() as home,
            mock.patch("unde.gradients.feature_pass.MOST", BATCH[case]),
        ):
            folder = Path(home) / "i"
            given = model, task, first(data, n), folder
            whole, _ = timed(Index.build, *given, method=method, progress=False)
            logged = [json.loads(entry) for entry in (folder / "log.jsonl").read_text().splitlines()]
            found = {"build": whole, "direct": whole - sum(e["seconds"] for e in logged)}
            if queries:
                found |= _asked(Index, bench, model, task, data, folder, queries)
        print(json.dumps(found), flush=True)


def _asked(
    Index: Any, bench: Any, model: Any, task: Any, data: Any, folder: Path, queries: int
) -> dict[str, Any]:
    """Opening an index, its first query, and one more, beside the plain pass of a query."""
    from unde.data import Rows

    rows = Rows(data, task.collate)
    seconds: dict[str, list[float]] = {"open": [], "first": [], "more": [], "plain": []}

    def ask(index: Any, query: list[Any]) -> None:
        index.score(query).total()

    index = None
    for _ in range(3):
        took, index = timed(Index.open, folder, model=model, task=task)
        seconds["open"].append(took)
        seconds["first"].append(timed(ask, index, [rows[0]])[0])
    for i in range(queries):
        query = [rows[i % len(rows)]]
        seconds["plain"].append(timed(bench.plain_pass, model, task, [rows.collate(query)])[0])
        seconds["more"].append(timed(ask, index, query)[0])
    return {name: float(np.median(each)) for name, each in seconds.items()}


class Worker:
    """The package of one src folder."""

    def __init__(self, source: str | None) -> None:
        env = dict(os.environ)
        if source is not None:
            env["PYTHONPATH"] = os.pathsep.join([source, env.get("PYTHONPATH", "")])
        command = [sys.executable, "-m", "benchmarks.fixed", "--worker"]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            command,
            env=env,
            cwd=Path(__file__).parents[1],
            stdin=pipe,
            stdout=pipe,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def __call__(self, case: str, rank: int, n: int, queries: int = 0) -> dict[str, float]:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps([case, rank, n, queries]) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the process that builds {case} ended ({self.process.wait()})")
        return json.loads(line)

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def measure(
    quick: bool = False,
    against: str | None = None,
    cases: Sequence[str] = tuple(COUNTS),
    ranks: Sequence[int] = RANKS,
) -> dict[str, Any]:
    """Rows of case and rank; with `against`, the same of the package there, under "before"."""
    rounds, queries = (3, 10) if quick else (5, 40)
    workers = {"now": Worker(None)} | ({} if against is None else {"before": Worker(against)})
    rows = []
    try:
        for case in cases:
            for rank in ranks[:1] if quick else ranks:
                rows.append({"case": case, "rank": rank, **_fixed(workers, case, rank, rounds, queries)})
    finally:
        for worker in workers.values():
            worker.close()
    return {"machine": machine(), "torch": torch.__version__, "goals": GOALS, "rows": rows}


def _fixed(workers: dict[str, Worker], case: str, rank: int, rounds: int, queries: int) -> dict[str, Any]:
    counts = COUNTS[case]
    cold = {name: worker(case, rank, counts[0])["build"] for name, worker in workers.items()}
    times: dict[str, list[list[float]]] = {name: [] for name in workers}
    direct: dict[str, list[float]] = {name: [] for name in workers}
    for _ in range(rounds):
        seen: dict[str, list[float]] = {name: [] for name in workers}
        for n in counts:
            for name, worker in workers.items():
                found = worker(case, rank, n)
                seen[name].append(found["build"])
                direct[name].append(found["direct"])
        for name, each in seen.items():
            times[name].append(each)
    out: dict[str, Any] = {}
    for name in workers:
        lines = np.array([np.polyfit(counts, each, 1) for each in times[name]])  # slope, intercept
        spread = np.random.default_rng(0).choice(lines[:, 1], (2000, rounds))
        low, high = np.quantile(np.median(spread, axis=1), (0.025, 0.975))
        out[name] = {
            "intercept": round(float(np.median(lines[:, 1])), 3),
            "interval95": [round(float(low), 3), round(float(high), 3)],
            "direct": round(float(np.median(direct[name])), 3),
            "per_example_ms": round(1e3 * float(np.median(lines[:, 0])), 2),
            "first_build": round(cold[name], 3),
        }
    asked = workers["now"](case, rank, counts[1], queries)
    out["query"] = {
        "ratio": round(asked["more"] / asked["plain"], 3),
        "first_ratio": round(asked["first"] / asked["plain"], 3),
        **{f"{name}_ms": round(1e3 * asked[name], 1) for name in ("plain", "more", "first", "open")},
    }
    return out


def machine() -> dict[str, object]:
    """What was measured on."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return {
        "processor": next(named, platform.machine()),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }


def shown(result: dict[str, Any]) -> str:
    lines = []
    for row in result["rows"]:
        now, query = row["now"], row["query"]
        low, high = now["interval95"]
        before = f"; before {row['before']['intercept']:.2f}" if "before" in row else ""
        lines.append(
            f"{row['case']:6} rank {row['rank']:2}: {now['intercept']:.2f} s [{low:.2f}, {high:.2f}], goal "
            f"{result['goals'][row['case']]}{before}; direct {now['direct']:.2f}; the first build of a process "
            f"{now['first_build']:.2f} in all; a query {query['ratio']:.2f} of a plain pass ({query['plain_ms']} ms), "
            f"the first {query['first_ratio']:.2f}, opening {query['open_ms']} ms"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--against", help="the src folder of another version")
    parser.add_argument("--case", choices=list(COUNTS))
    parser.add_argument("--rank", type=int)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work()
        return
    cases, ranks = (
        [options.case] if options.case else list(COUNTS),
        [options.rank] if options.rank else RANKS,
    )
    result = measure(options.quick, options.against, cases, ranks)
    print(shown(result))
    if not options.quick:
        keep(result)


def keep(result: dict[str, Any]) -> None:
    """In the file of results, in place of earlier rows of the same case and rank."""
    there = json.loads(RESULTS.read_text())["rows"] if RESULTS.exists() else []
    named = {(r["case"], r["rank"]): r for r in [*there, *result["rows"]]}
    RESULTS.write_text(json.dumps({**result, "rows": [named[key] for key in sorted(named)]}, indent=1) + "\n")


if __name__ == "__main__":
    main()
