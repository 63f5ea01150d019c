"""The `unde` command: all commands, and errors as one line without a traceback."""

from __future__ import annotations

from typing import Annotated

import typer

from unde import console
from unde.cli.append import append, merge, remove, repack
from unde.cli.attribute import attribute
from unde.cli.build import build, finish
from unde.cli.calibrate import calibrate
from unde.cli.demo import demo
from unde.cli.evaluate import evaluate
from unde.cli.interrupts import Commands, Interrupted, unwinding_on_sigterm
from unde.cli.learn import learn
from unde.cli.options import expand_groups
from unde.cli.plan import bench, plan
from unde.cli.push import pull, push
from unde.cli.report import report
from unde.cli.serve import serve
from unde.cli.verify import verify
from unde.errors import UndeError
from unde.version import __version__

app = typer.Typer(
    name="unde",
    cls=Commands,
    help="Which training examples made a trained model do that?\n\n"
    "A Hugging Face language model needs no Python: `unde build --hf-model DIR --data train.jsonl --out runs/idx`, "
    'then `unde attribute --index runs/idx --query "some text"`.\n\n'
    "Any other model is named as web servers name apps: my_project.setup:make, where make() returns an unde.Setup.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)
for command in (
    *(demo, plan, build, finish, append, remove, merge, repack),
    *(calibrate, learn, attribute, evaluate, report, serve, verify, push, pull, bench),
):
    app.command()(expand_groups(command))


def _version(value: bool) -> None:
    if value:
        typer.echo(f"unde {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="print the version")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run a command. An error or an interrupt is one clear line."""
    with unwinding_on_sigterm():
        try:
            app()
        except UndeError as e:
            console.fail(str(e))
            raise SystemExit(2) from None
        except Interrupted as e:
            console.note(str(e))
            raise SystemExit(e.code) from None
