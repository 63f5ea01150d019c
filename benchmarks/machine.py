"""What was measured on, and with what: ratios differ between processors."""

from __future__ import annotations

import os
import platform
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

SETS = {
    "AVX2": "avx2",
    "AVX-512": "avx512f",
    "AVX-512 VNNI": "avx512_vnni",
    "AVX-512 BF16": "avx512_bf16",
    "AMX": "amx_tile",
    "AMX BF16": "amx_bf16",
    "NEON": "asimd",
    "SVE": "sve",
}
PACKAGES = ("unde", "numpy", "scipy", "transformers", "diffusers")


def machine(cpuinfo: str | None = None) -> dict[str, Any]:
    """Of `cpuinfo`, as Linux writes it; of this machine unless it is given."""
    if cpuinfo is None:
        info = Path("/proc/cpuinfo")
        cpuinfo = info.read_text() if info.exists() else ""
    told: dict[str, str] = {}
    for line in cpuinfo.splitlines():
        key, _, value = line.partition(":")
        told.setdefault(key.strip(), value.strip())
    flags = set((told.get("flags") or told.get("Features") or "").split())
    return {
        "processor": told.get("model name", platform.processor() or platform.machine()),
        "family": " ".join(told[k] for k in ("cpu family", "model", "stepping") if k in told),
        "sets": [name for name, flag in SETS.items() if flag in flags],
        "instructions": torch.backends.cpu.get_cpu_capability(),  # what torch makes use of
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }


def provenance(seed: int, quick: bool) -> dict[str, Any]:
    versions = {"torch": torch.__version__, "python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {
        "machine": machine(),
        "versions": versions,
        "seed": seed,
        "quick": quick,
        "begun": time.strftime("%Y-%m-%d %H:%M", time.gmtime()),
        "load": [round(x, 2) for x in os.getloadavg()] if hasattr(os, "getloadavg") else None,
    }


def same_processor(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return all(a.get(key) == b.get(key) for key in ("processor", "family", "instructions", "threads"))


def status(field: str) -> int:
    """Bytes, as Linux tells them: VmRSS is what is held now, VmHWM the most since the peak was forgotten."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(field))


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def drop_cache(folder: Path) -> None:
    """Remove the shards of an index from the page cache."""
    for path in folder.rglob("*.safetensors"):
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
