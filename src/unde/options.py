"""Options that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

METHODS = "tracin, tracin-cosine, trak, logra or ekfac"

Target = Annotated[
    str | None, typer.Argument(metavar="MODULE:FUNCTION", help="a function that returns an unde.Setup")
]
IndexPath = Annotated[
    Path, typer.Option("--index", help="folder of the index; remembers what it was built from")
]
MethodName = Annotated[str | None, typer.Option(help=f"{METHODS} (default: as built)")]
WeightsFile = Annotated[Path | None, typer.Option("--weights", help="weights from `unde learn`")]
WeightsFiles = Annotated[
    list[str] | None,
    typer.Option(
        "--weights", metavar="[NAME=]FILE", help="weights from `unde learn`; several: NAME=FILE each"
    ),
]
BatchSize = Annotated[int, typer.Option(help="examples in one pass; fewer need less memory")]
Device = Annotated[str | None, typer.Option(help="where the model runs: cpu, cuda, cuda:1, mps, …")]
NoTrust = Annotated[
    bool,
    typer.Option(
        "--no-trust", help="leave out how many training examples find themselves (300 passes of the model)"
    ),
]
