"""Speed and memory of the feature pass, as ratios to a plain training pass measured in the same run.

    python benchmarks/features.py                   # prints the table, writes benchmarks/results/features.json
    python benchmarks/features.py --case resnet --rank 16 --runs 5

Cases: ResNet-18 (transformers) on 32 × 32 images in batches of 32; a GPT-2 of 6 layers, 256 wide, on 256
tokens in batches of 8; UNets of diffusers on 16 × 16 images in batches of 8, each at 10 timesteps: unconditional
(ddpm), with text (text), and the latter frozen but for LoRA of rank 16 (lora), whose plain pass is that of LoRA
training. Peak memory is the high-water mark of a process of its own for each pass.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import torch

from unde import Setup, bench
from unde.data import Rows
from unde.features import floor
from unde.methods import TracIn
from unde.tasks import CausalLM, Classification, Diffusion

RESULTS = Path(__file__).parent / "results" / "features.json"
BATCH = {"resnet": 32, "gpt2": 8, "ddpm": 8, "text": 8, "lora": 8}
BATCHES = {"resnet": 12, "gpt2": 2, "ddpm": 2, "text": 2, "lora": 2}  # of one run
TIMESTEPS = 10


def resnet() -> Setup:
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(
        depths=[2, 2, 2, 2], hidden_sizes=[64, 128, 256, 512], layer_type="basic", num_labels=10
    )
    data = (torch.randn(128, 3, 32, 32), torch.randint(0, 10, (128,)))
    return Setup(ResNetForImageClassification(config), Classification(), data)


def gpt2() -> Setup:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=6, n_embd=256, n_head=8, n_positions=256, vocab_size=8192, bos_token_id=0, eos_token_id=0
    )
    data = {"input_ids": torch.randint(0, 8192, (32, 256))}
    return Setup(GPT2LMHeadModel(config), CausalLM(), data)


def ddpm() -> Setup:
    from diffusers import DDPMScheduler, UNet2DModel

    unet = UNet2DModel(
        sample_size=16,
        layers_per_block=1,
        block_out_channels=(64, 128, 128),
        down_block_types=("DownBlock2D", "AttnDownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "AttnUpBlock2D", "UpBlock2D"),
    )
    return Setup(unet, Diffusion(DDPMScheduler(), TIMESTEPS), torch.randn(16, 3, 16, 16))


def text() -> Setup:
    from diffusers import DDPMScheduler, UNet2DConditionModel

    unet = UNet2DConditionModel(
        sample_size=16,
        layers_per_block=1,
        block_out_channels=(64, 128, 128),
        down_block_types=("CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=256,
    )
    data = {"latents": torch.randn(16, 4, 16, 16), "encoder_hidden_states": torch.randn(16, 20, 256)}
    return Setup(unet, Diffusion(DDPMScheduler(), TIMESTEPS), data)


def lora() -> Setup:
    from unde.integrations.diffusers import add_lora

    setup = text()
    for p in add_lora(setup.model, rank=16):
        torch.nn.init.normal_(p, std=0.02)  # as if trained: fresh LoRA has gradients of zero
    return setup


CASES = {"resnet": resnet, "gpt2": gpt2, "ddpm": ddpm, "text": text, "lora": lora}


def peak_memory(case: str, what: str, rank: int) -> int:
    """Bytes that one pass adds to the peak of a fresh process."""
    command = [sys.executable, __file__, "--case", case, "--rank", str(rank), "--peak", what]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def print_peak(case: str, what: str, rank: int) -> None:
    setup = CASES[case]()
    rows, size = Rows(setup.train_data, setup.task.collate), BATCH[case]
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak of the imports
    before = _status("VmRSS")
    if what == "plain":
        cuts = (range(start, start + size) for start in range(0, len(rows), size))
        floor.plain(setup.model, setup.task, map(rows.batch, cuts))
    else:
        bench.build(setup, rows, TracIn(projection=f"kron({rank})"))
    print(_status("VmHWM") - before)


def _status(field: str) -> int:
    """Bytes, as Linux tells them: VmRSS is what is held now, VmHWM the most since the peak was forgotten."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(field))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--case", choices=list(CASES))
    parser.add_argument("--rank", type=int)
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--peak", choices=["plain", "build"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.manual_seed(0)
    if options.peak:
        print_peak(options.case, options.peak, options.rank)
        return
    rows = []
    for case in [options.case] if options.case else CASES:
        for rank in [options.rank] if options.rank else (16, 64):
            cost = bench.measure(CASES[case](), rank, BATCH[case], options.runs, BATCHES[case])
            memory = {what: peak_memory(case, what, rank) for what in ("plain", "build")}
            rows.append({"case": case, "rank": rank, **cost.as_dict(), "peak_bytes": memory})
            print(f"{case} rank {rank}: {cost}")
            print(
                f"  peak memory {memory['build'] / 2**20:.0f} MiB, plain {memory['plain'] / 2**20:.0f} MiB",
                flush=True,
            )
    keep(rows)


def machine() -> dict[str, object]:
    """What was measured on: ratios differ between processors."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return {
        "processor": next(named, platform.machine()),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }


def keep(rows: list[dict]) -> None:
    """Write the rows into the results file, in place of earlier ones of the same case and rank."""
    there = json.loads(RESULTS.read_text())["rows"] if RESULTS.exists() else []
    named = {(r["case"], r["rank"]): r for r in [*there, *rows]}
    result = {"machine": machine(), "torch": torch.__version__, "rows": [named[key] for key in sorted(named)]}
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
