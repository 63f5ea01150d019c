"""The `unde` command: all commands; errors and interrupts as one line without a traceback."""

from __future__ import annotations

import inspect
import os
import signal
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from functools import wraps
from types import FrameType
from typing import Annotated, Any, get_type_hints

import typer
from typer.core import TyperGroup

from unde import console
from unde.cli.append import append, merge, remove
from unde.cli.attribute import attribute
from unde.cli.audit import audit
from unde.cli.build import bench, build, finish, plan
from unde.cli.config import name_flags
from unde.cli.evaluate import evaluate
from unde.cli.leaks import leaks
from unde.cli.learn import calibrate, learn
from unde.cli.report import demo, report, serve
from unde.cli.select import select
from unde.cli.store import pull, push, verify
from unde.errors import UndeError
from unde.version import __version__

# Commands that resume an interrupted run.
_RESUMED = frozenset(["build", "finish", "append", "remove", "merge", "push", "pull"])


class Terminated(KeyboardInterrupt):
    """SIGTERM. It unwinds as Ctrl-C does, so that files and processes are closed."""


class Interrupted(Exception):
    """A command that a signal ended: the message has its progress and how to resume, the code is that of the signal."""

    def __init__(self, command: str | None, interrupt: KeyboardInterrupt) -> None:
        how = "it goes on where it stopped" if command in _RESUMED else "it starts from the beginning"
        reached = f" {interrupt}" if interrupt.args else ""  # from the open progress bar
        super().__init__(f"interrupted{reached}; run the same command again, {how}")
        number = signal.SIGTERM if isinstance(interrupt, Terminated) else signal.SIGINT
        self.code = 128 + number


class Commands(TyperGroup):
    """The group of all commands. It catches interrupts, since typer would end silently."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except UndeError as e:
            raise UndeError(name_flags(str(e), self.get_command(ctx, ctx.invoked_subcommand))) from e
        except KeyboardInterrupt as e:
            raise Interrupted(ctx.invoked_subcommand, e) from None


def expand_groups(function: Callable[..., None]) -> Callable[..., None]:
    """Replace each parameter that is a group of options by the group's fields, as typer has plain parameters only."""
    hints = get_type_hints(function, include_extras=True)
    groups, parameters = dict[str, Any](), list[inspect.Parameter]()
    for p in inspect.signature(function).parameters.values():
        kind = hints[p.name]
        if is_dataclass(kind):
            groups[p.name], types = kind, get_type_hints(kind, include_extras=True)
            plain = [(f.name, types[f.name], f.default) for f in fields(kind)]
        else:
            plain = [(p.name, kind, p.default)]
        parameters += [
            inspect.Parameter(name, p.KEYWORD_ONLY, annotation=type_, default=default)
            for name, type_, default in plain
        ]

    @wraps(function)
    def run(**options: Any) -> None:
        for name, kind in groups.items():
            options[name] = kind(**{f.name: options.pop(f.name) for f in fields(kind)})
        function(**options)

    run.__signature__ = inspect.Signature(parameters)  # ty: ignore[missing-attribute]
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    return run


app = typer.Typer(
    name="unde",
    cls=Commands,
    help="Which training examples made a trained model do that?\n\n"
    "`unde demo` shows all of it in a minute. A Hugging Face language model needs no Python: "
    "`unde build --hf-model DIR --data train.jsonl --out runs/idx`, "
    'then `unde attribute --index runs/idx --query "some text"`.\n\n'
    "Any other model is named as web servers name apps: my_project.setup:make, where make() returns an unde.Setup.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)
PANELS = {
    "Start": (demo,),
    "Make an index": (plan, build, finish, append, remove, merge),
    "Ask it": (calibrate, learn, attribute, evaluate, audit, leaks, select, report, serve),
    "Files and speed": (verify, push, pull, bench),
}
for panel, commands in PANELS.items():
    for command in commands:
        app.command(rich_help_panel=panel)(expand_groups(command))


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


@contextmanager
def unwinding_on_sigterm() -> Generator[None]:
    owner = os.getpid()

    def stop(number: int, frame: FrameType | None) -> None:
        if os.getpid() == owner:
            raise Terminated
        signal.signal(number, signal.SIG_DFL)  # a forked process that reads data just ends
        os.kill(os.getpid(), number)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
