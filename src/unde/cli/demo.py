"""`unde demo`: every step once, on real digits."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from unde import console
from unde.cli.options import MethodName, path_option


def demo(
    out: Annotated[Path, path_option(help="folder for the page, the index and the weights")] = Path("demo"),
    method: MethodName = "trak",
    seed: Annotated[int, typer.Option(help="seed of the training and the projection")] = 0,
) -> None:
    """Train a small ResNet on real digits and see which of them mattered, in a page.

    Example: `unde demo --out demo` writes demo/report.html
    """
    from unde.ui.demo.run import run

    console.echo(f"Open {run(out, method, seed).resolve()} in a browser.")
