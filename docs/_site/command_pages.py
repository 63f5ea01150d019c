"""The directive `commands`: what `unde NAME --help` says of each, from the command line itself."""

from __future__ import annotations

import inspect
import re
from typing import Any

from docutils import nodes
from docutils.statemachine import StringList
from sphinx.util.docutils import SphinxDirective
from typer.main import get_command

from unde.cli import app


def markdown(name: str) -> str:
    """Usage, text and options of a command."""
    command = get_command(app).commands[name]
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    options = [p for p in command.params if p.param_type_name == "option" and p.name != "help"]
    given = "".join(f" {a.metavar}" if a.required else f" [{a.metavar}]" for a in arguments)
    out = [f"```text\nunde {name}{given} [OPTIONS]\n```", inspect.cleandoc(command.help or "")]
    for each in [*arguments, *options]:
        said = each.metavar if each in arguments else ", ".join([*each.opts, *each.secondary_opts])
        value = f" {each.metavar}" if each in options and each.metavar else ""
        default = getattr(each, "default", None)
        shown = f" (default: `{default}`)" if getattr(each, "show_default", False) and _plain(default) else ""
        needed = " Needed." if each in options and each.required else ""
        text = re.sub(r"([<>*_|])", r"\\\1", each.help or "")
        out.append(f"`{said}{value}`\n: {text}{shown}{needed}")
    return "\n\n".join(out)


def _plain(value: Any) -> bool:
    return isinstance(value, (str, int, float)) and not isinstance(value, bool) and value != ""


class Commands(SphinxDirective):
    """A section for each command, in the order of `unde --help`."""

    def run(self) -> list[nodes.Node]:
        out: list[nodes.Node] = []
        for name in get_command(app).commands:
            section = nodes.section(ids=[f"unde-{name}"], names=[f"unde {name}"])
            section += nodes.title(text=f"unde {name}")
            lines = StringList(markdown(name).splitlines(), source="unde --help")
            self.state.nested_parse(lines, self.content_offset, section)
            out.append(section)
        return out


def setup(app: Any) -> dict[str, Any]:
    app.add_directive("commands", Commands)
    return {"parallel_read_safe": True}
