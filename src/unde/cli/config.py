"""`--config run.toml`: options in a file. Every index gets the one that builds it again. Options in messages."""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from unde.cli.options import local_path, option
from unde.errors import UndeError, unknown
from unde.store.files import checksum, read_bounded, write_bytes
from unde.store.layout import CHECKSUM, MANIFEST, RUN
from unde.store.remote import StorePath

tomllib = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
_LONGEST = 2**20  # bytes
_NEVER = {"config", "help", "trust_remote_code"}
_WHO = {"engine", "workers", "worker", "gpus", "address", "timeout"}  # computes: no bit depends on it


def _configure(context: typer.Context, path: Path | None) -> Path | None:
    """What the file says takes the place of the defaults, so that the command line wins."""
    if path is not None and not context.resilient_parsing:
        context.default_map = {**(context.default_map or {}), **_read(path, context)}
    return path


Config = Annotated[
    Path | None,
    option(
        "options as keys of a TOML file, such as the run.toml in the folder of an index; the command line wins",
        "--config",
        metavar="FILE",
        is_eager=True,
        callback=_configure,
        parser=local_path,
    ),
]


def _read(path: Path, context: typer.Context) -> dict[str, Any]:
    """The parameters of a command that a file names, by their names in Python."""
    try:
        found = tomllib.loads(read_bounded(path, _LONGEST, follow=True).decode())
    except FileNotFoundError:
        raise UndeError(f"no file {path}: expected a TOML file of options") from None
    except OSError as e:
        raise UndeError(f"cannot read {path} ({e.strerror or e})") from None
    except ValueError as e:  # what is no TOML, and what is no UTF-8
        raise UndeError(f"{path} is not TOML: {e}") from None
    own = known = _keys(context.command)
    commands: Mapping[str, Any] = getattr(context.find_root().command, "commands", {})
    if "build" in commands:
        known = _keys(commands["build"]) | own  # those of a build that say nothing to a plan
    out = {}
    for key, value in found.items():
        name = key.replace("_", "-")
        if name == "trust-remote-code":
            raise UndeError(
                f"{path}: {key} is no key: whose code to run is said on the command line each time"
            )
        if name not in known:
            raise unknown(f"key of {path}", key, known)
        _check(path, key, value, known[name])
        if name in own:
            out[own[name].name] = value
    _check_target(path, found.get("target"))
    return out


def _keys(command: Any) -> dict[str, Any]:
    """The parameters of a command by what they are called in a file: options without their dashes, and `target`."""
    named = {}
    for p in command.params:
        if p.name not in _NEVER:
            long = [o.removeprefix("--") for o in p.opts if o.startswith("--")]
            named[long[0] if long else p.name] = p
    return named


def _check(path: Path, key: str, value: Any, parameter: Any) -> None:
    if parameter.multiple:
        expected, right = (
            "a list of texts",
            isinstance(value, list) and all(isinstance(v, str) for v in value),
        )
    elif getattr(parameter, "is_flag", False):
        expected, right = "true or false", isinstance(value, bool)
    else:
        expected = "a text or number"
        right = isinstance(value, (str, int, float)) and not isinstance(value, bool)
    if not right:
        raise UndeError(f"{path}: {key} is {json.dumps(value, default=str)}: expected {expected}")


def _check_target(path: Path, target: Any) -> None:
    """An index may come from somebody else: MODULE:FUNCTION of its file is run only if this user has built it."""
    if target is None or path.name != RUN or not (path.parent / MANIFEST).exists():
        return
    from unde.integrations.source import trusted_target

    if trusted_target(path.parent) != target:
        raise UndeError(
            f"{path} names {target!r}, which is not what {path.parent} was built from: give MODULE:FUNCTION"
        )


def write_config(index: StorePath, settings: Mapping[str, Any]) -> None:
    """The file of an index. `settings` are all parameters of the build, as they came out; None is not written."""
    left_out = _NEVER | _WHO | {"out", "overwrite"}
    lines = [
        f"{name.replace('_', '-')} = {_toml(value)}\n"
        for name, value in settings.items()
        if name not in left_out and value is not None and value not in ([], ())
    ]
    text = f"# Builds this index again: unde build --config {RUN} --out …\n" + "".join(lines)
    write_bytes(index / RUN, f"{text}{CHECKSUM}{checksum(text)}\n".encode())


def _toml(value: Any) -> str:
    """
    >>> print(_toml(["a", "é"]), _toml(True), _toml(0.5))
    ["a", "é"] true 0.5
    """
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_toml, value))}]"
    text = json.dumps(value if isinstance(value, (bool, int, float)) else str(value), ensure_ascii=False)
    return text.replace("\x7f", "\\u007f")


# --- messages of the library, with options in place of arguments of Python -----------------------------------

# “memory=” or “disk='1GB'”; not within a call such as “TRAK(damping=0.1)”.
_ARGUMENT = re.compile(
    r"\w+\([^()]*=[^()]*\)|(?<![\w.-])(?P<name>\w+)=(?:'(?P<value>[^']*)')?(?=[\s,.;:)]|$)"
)


def name_flags(message: str, command: Any) -> str:
    """Name options as the command line does: “raise memory=” becomes “raise --memory”."""
    flags = {p.name: p.opts[-1] for p in command.params if p.opts and p.opts[-1].startswith("--")}

    def flag(match: re.Match[str]) -> str:
        name, value = match["name"], match["value"]
        if name not in flags:
            return match[0]
        return f"{flags[name]} {value}" if value else str(flags[name])

    return _ARGUMENT.sub(flag, message)
