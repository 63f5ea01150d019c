"""Ctrl-C and SIGTERM: one line with the progress and how to resume, and the exit code of the signal."""

from __future__ import annotations

import os
import signal
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from typer.core import TyperGroup

# Commands that resume an interrupted run.
_RESUMED = frozenset(["build", "finish", "append", "remove", "merge", "repack", "push", "pull"])


class Terminated(KeyboardInterrupt):
    """SIGTERM. It unwinds as Ctrl-C does, so that files and processes are closed."""


class Interrupted(Exception):
    """A command that a signal ended; the message is for its user."""

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
        except KeyboardInterrupt as e:
            raise Interrupted(ctx.invoked_subcommand, e) from None


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
