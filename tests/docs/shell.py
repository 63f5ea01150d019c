"""Commands as documents print them: taken apart, checked against what is there, and run in this process."""

from __future__ import annotations

import importlib.util
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

import tomllib
from blocks import ROOT
from typer.main import get_command
from typer.testing import CliRunner

from unde.cli import app

COMMANDS = get_command(app).commands
EXTRAS = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))


@dataclass(frozen=True)
class Command:
    words: list[str]
    into: str | None = None  # the file that its output goes to


def commands(code: str) -> list[Command]:
    """
    >>> commands("$ unde attribute --index idx \\\\\\n  --top 3 > top.csv  # the best")
    [Command(words=['unde', 'attribute', '--index', 'idx', '--top', '3'], into='top.csv')]
    """
    out = []
    for line in re.sub(r"\\\n\s*", "", code).splitlines():
        words = shlex.split(re.sub(r"^\s*\$ ", "", line), comments=True)
        while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
            words = words[1:]  # NAME=value before a command
        if words:
            at = words.index(">") if ">" in words else len(words)
            out.append(Command(words[:at], words[at + 1] if at < len(words) else None))
    return out


def check(words: list[str]) -> None:
    """Raises AssertionError if there is no such command, option, extra, module or target."""
    name, *rest = words
    if name == "unde":
        _check_unde(rest)
    elif name == "pip":
        found = re.findall(r"unde\[([\w,-]+)\]|\.\[([\w,-]+)\]", " ".join(rest))
        named = {extra for pair in found for part in pair for extra in part.split(",") if extra}
        assert named <= EXTRAS, f"no extra {sorted(named - EXTRAS)}"
    elif name == "make":
        targets = {word for word in rest if "=" not in word}  # others are variables
        assert targets <= TARGETS, f"no target {rest}"
    elif name == "python" and rest[0] == "-m":
        assert importlib.util.find_spec(rest[1]) is not None, f"no module {rest[1]}"
    elif name == "python" and rest[0].endswith(".py"):
        source = (ROOT / rest[0]).read_text()
        options = [word for word in rest[1:] if word.startswith("--")]
        assert [o for o in options if f'"{o}"' not in source] == [], f"{rest[0]} has no such option"
    else:
        assert name in {"cd", "export", "sbatch", "mkdir"}, f"nobody knows how to check {words}"


def _check_unde(words: list[str]) -> None:
    if words[0].startswith("-"):
        assert words[0] in {"--help", "--version", "--install-completion", "--show-completion"}, words
        return
    assert words[0] in COMMANDS or words[0].isupper(), f"no command unde {words[0]}"
    if words[0] in COMMANDS:
        command = COMMANDS[words[0]]
        context = command.context_class(command)
        try:
            command.make_parser(context).parse_args(words[1:])
        except Exception as e:  # typer has a UsageError of its own, which has no public name
            raise AssertionError(f"unde {' '.join(words)}: {e}") from None


def run(command: Command) -> str:
    """An `unde` command, in this process; what it prints."""
    done = CliRunner().invoke(app, command.words[1:])
    if done.exception and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == 0, f"{' '.join(command.words)}\n{done.output}"
    if command.into is not None:
        Path(command.into).write_text(done.stdout)
    return done.stdout


def options() -> set[str]:
    """Of all commands."""
    return {name for c in COMMANDS.values() for p in c.params for name in (*p.opts, *p.secondary_opts)}
