"""Messages of the library with the options of a command in place of arguments of Python."""

from __future__ import annotations

import re
from typing import Any

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
