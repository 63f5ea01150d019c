"""Ctrl-C and SIGTERM: one line that says how far a command got and how to go on, and the exit code of the signal."""

from __future__ import annotations

import os
import signal
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from typer.core import TyperGroup

_RESUMED = {
    "build",
    "finish",
    "append",
    "remove",
    "merge",
    "repack",
    "push",
    "pull",
}  # commands that find what they did before


class Terminated(KeyboardInterrupt):
    """SIGTERM. It unwinds as Ctrl-C does, so that files and processes are closed."""


class Interrupted(Exception):
    """A command that a signal ended; the message is all that its user needs to know."""

    def __init__(self, command: str | None, interrupt: KeyboardInterrupt) -> None:
        how = "it goes on where it stopped" if command in _RESUMED else "it starts from the beginning"
        reached = f" {interrupt}" if interrupt.args else ""  # said by the progress bar that was open
        super().__init__(f"interrupted{reached}; run the same command again, {how}")
        number = signal.SIGTERM if isinstance(interrupt, Terminated) else signal.SIGINT
        self.code = 128 + number


class Commands(TyperGroup):
    """The group of all commands. Interrupts are caught here, as typer would end without a word."""

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
