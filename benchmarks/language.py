"""Speed and memory of LoGRA and EKFAC on language models, as ratios to a plain training pass of the same run.

    python benchmarks/language.py                        # prints the table, writes benchmarks/results/language.json
    python benchmarks/language.py --case llama --runs 5

Cases: a GPT-2 of 6 layers, 256 wide, and a Llama of 6 layers, 256 wide, on 256 tokens in batches of 8. Timed in
turn, over and over: the plain pass, the frozen pass, the builds (writing included, planning not), and the second
pass of EKFAC, which reads stored features and not the model. "none" is EKFAC without projection.
Peak memory is the high-water mark of a process of its own for each pass.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from features import BATCH, _status, gpt2, machine
from unde import Index, Setup, bench
from unde.data import Rows
from unde.features import floor
from unde.methods import EKFAC, LoGRA, Method
from unde.tasks import CausalLM

RESULTS = Path(__file__).parent / "results" / "language.json"
SIZE, BATCHES = BATCH["gpt2"], 2


def llama() -> Setup:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=8192, hidden_size=256, intermediate_size=704, num_hidden_layers=6, num_attention_heads=8,
        num_key_value_heads=4, max_position_embeddings=256, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    data = {"input_ids": torch.randint(0, 8192, (32, 256))}
    return Setup(LlamaForCausalLM(config), CausalLM(), data)


CASES = {"gpt2": gpt2, "llama": llama}
METHODS: dict[str, Method] = {
    "LoGRA 16": LoGRA(projection="kron(16)"),
    "EKFAC 16": EKFAC(projection="kron(16)"),
    "LoGRA 64": LoGRA(projection="kron(64)"),
    "EKFAC 64": EKFAC(projection="kron(64)"),
    "EKFAC none": EKFAC(projection="none"),
}


def second_pass(method: Method, index: Index) -> None:
    """Bases and corrected eigenvalues; the kernel itself is applied to queries."""
    index._opened.scorer.training(method)


def batches(rows: Rows) -> Iterator[Any]:
    return (rows.batch(range(a, a + SIZE)) for a in range(0, len(rows), SIZE))


def run(setup: Setup, rows: Rows, seconds: dict[str, list[float]]) -> None:
    """Every pass once."""
    for name, other in (("plain", floor.plain), ("frozen", floor.frozen)):
        begun = time.perf_counter()
        other(setup.model, setup.task, batches(rows))
        seconds.setdefault(name, []).append(time.perf_counter() - begun)
    for name, method in METHODS.items():
        fitting: list[float] = []

        def use(index: Index, method: Method = method, fitting: list[float] = fitting) -> None:
            if isinstance(method, EKFAC):
                begun = time.perf_counter()
                second_pass(method, index)
                fitting.append(time.perf_counter() - begun)

        seconds.setdefault(name, []).append(bench.build(setup, rows, method, use, memory="8GB"))
        if fitting:
            seconds.setdefault(f"{name}, second pass", []).append(fitting[0])


def peak_memory(case: str, what: str) -> int:
    """Bytes that one pass adds to the peak of a fresh process."""
    command = [sys.executable, __file__, "--case", case, "--peak", what]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def print_peak(case: str, what: str) -> None:
    setup = CASES[case]()
    rows = Rows(setup.train_data, setup.task.collate)
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak of the imports
    before = _status("VmRSS")
    if what == "plain":
        floor.plain(setup.model, setup.task, batches(rows))
    else:
        bench.build(setup, rows, METHODS[what])
    print(_status("VmHWM") - before)


def interval(ratios: np.ndarray) -> tuple[float, float]:
    """A 95 % interval of the median, by bootstrap over the runs."""
    medians = np.median(np.random.default_rng(0).choice(ratios, (2000, len(ratios))), axis=1)
    return float(np.quantile(medians, 0.025)), float(np.quantile(medians, 0.975))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--case", choices=list(CASES))
    parser.add_argument("--runs", type=int, default=11)
    parser.add_argument("--peak", choices=["plain", *METHODS], help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.manual_seed(0)
    if options.peak:
        print_peak(options.case, options.peak)
        return
    results: dict[str, Any] = json.loads(RESULTS.read_text())["cases"] if RESULTS.exists() else {}
    for case in [options.case] if options.case else CASES:
        setup, seconds = CASES[case](), {}
        rows = Rows(setup.train_data, setup.task.collate)
        rows = Rows([rows[i] for i in range(BATCHES * SIZE)], setup.task.collate)
        for _ in range(options.runs + 1):
            run(setup, rows, seconds)
        plain = np.array(seconds["plain"][1:])  # the first run warms up
        results[case] = {"plain_seconds": float(np.median(plain)), "runs": options.runs, "passes": {}}
        print(f"{case}: {BATCHES * SIZE} sequences of 256 tokens, {options.runs} interleaved runs")
        peaks = {what: peak_memory(case, what) for what in ("plain", *METHODS)}
        for name, spent in seconds.items():
            ratios = np.array(spent[1:]) / plain
            low, high = interval(ratios)
            entry = {
                "ratio": round(float(np.median(ratios)), 3),
                "interval95": [round(low, 3), round(high, 3)],
            }
            if name in peaks:
                entry["peak_bytes"] = peaks[name]
            results[case]["passes"][name] = entry
            memory = f"{peaks[name] / 2**20:6.0f} MiB" if name in peaks else ""
            print(f"  {name:28}{entry['ratio']:6.2f}  [{low:.2f}, {high:.2f}]  {memory}", flush=True)
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(
        json.dumps({"machine": machine(), "torch": torch.__version__, "cases": results}, indent=1) + "\n"
    )


if __name__ == "__main__":
    main()
