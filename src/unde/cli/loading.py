"""MODULE:FUNCTION, as it is typed or as an index remembers it, made real."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

from unde import console
from unde.errors import UndeError, unknown
from unde.integrations.source import Source, remembered_target
from unde.recipe import Setup


def load(target: str) -> Setup:
    """The Setup that `module:function` returns; modules are found from the current folder too."""
    module_name, colon, attribute = target.partition(":")
    if not colon or not module_name or not attribute:
        hint = f". For the model in this folder: --hf-model {target}" if os.path.isdir(target) else ""
        raise UndeError(
            f"cannot read {target!r}: expected MODULE:FUNCTION, for example my_project.setup:make{hint}"
        )
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as e:
        if e.name and (module_name == e.name or module_name.startswith(f"{e.name}.")):
            raise UndeError(
                f"no module {module_name!r} here: expected a file {module_name.replace('.', '/')}.py below "
                f"{os.getcwd()}, or an installed package"
            ) from None
        raise
    make = getattr(module, attribute, None)
    if make is None:
        raise unknown(
            f"function of {module_name}", attribute, [n for n in vars(module) if not n.startswith("_")]
        )
    setup = make() if callable(make) else make
    if not isinstance(setup, Setup):
        raise UndeError(
            f"{target} gave a {type(setup).__name__}: expected an unde.Setup(model, task, train_data, …)"
        )
    return setup


def remembered(index: Path, source: Source) -> str | None:
    """The MODULE:FUNCTION that an index remembers, said in a line; None if a model was named or none is there."""
    target = None if source.said else remembered_target(index)
    if target is not None:
        console.note(f"using {target}, as remembered by {index}")
    return target
