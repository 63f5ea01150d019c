"""The environments of peers, made once from the package index that pip is set up with, under benchmarks/envs.

Each holds the peer and what it alone needs. torch, transformers and the rest of the packages that we run with are
shared: a .pth file names their folder, and pip finds them there. torchvision and torchaudio are taken out again: their
wheels do not load beside a CPU build of torch, and transformers would try.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

from benchmarks.peers import PEERS
from benchmarks.rounds import Failed

ROOT = Path(__file__).parent.parent.parent
ENVS = ROOT / "benchmarks" / "envs"
UNWANTED = ("torchvision", "torchaudio")


def python_of(name: str) -> Path:
    """The interpreter of a peer's environment, which is made if it is not there or has another version."""
    folder = ENVS / name
    binary, made = folder / ("Scripts" if sys.platform == "win32" else "bin") / "python", folder / "made"
    wanted = f"{PEERS[name]} beside {_shared()}"
    if made.exists() and made.read_text() == wanted:
        return binary
    shutil.rmtree(folder, ignore_errors=True)
    venv.create(folder, with_pip=True)
    [packages] = [
        path for path in folder.rglob("site-packages") if path.parent.parent.name in ("lib", folder.name)
    ]
    (packages / "shared.pth").write_text(f"{_shared()}\n")
    _pip(binary, "install", "-c", str(ROOT / "constraints.txt"), PEERS[name])
    _pip(binary, "uninstall", "-y", *UNWANTED)
    made.write_text(wanted)
    return binary


def _shared() -> str:
    return str(Path(sysconfig.get_paths()["purelib"]).resolve())


def _pip(binary: Path, *words: str) -> None:
    command = [str(binary), "-m", "pip", "--quiet", "--disable-pip-version-check", *words]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        raise Failed(f"no environment: {(errors or done.stderr.splitlines() or ['pip failed'])[0]}")
