"""What a task is, so that an index can refuse features of another one.

Built-in tasks are told apart by their settings and a version number. Tasks of the user's own are also told apart by
their code: the syntax of `loss`, `measure` and the like, with the methods, the functions and classes of the same
module, the constants, defaults and closures that they use. Comments, docstrings, annotations, layout and the name of
the file do not count; functions of other modules count by name.

Another release of Python reads the same syntax alike as long as its grammar has not changed there.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator, Mapping
from types import CodeType, FunctionType
from typing import Any

from unde.tasks.reading import Reader, attributes, closed_code, package, sealed, underlying
from unde.tasks.syntax import names

ROOTS = ("loss", "measure", "measures", "token_losses", "mask", "collate")
_ASIDE = {"cutting", "version"}  # the one changes no numbers, the other stands for itself
_LIBRARIES = {"unde", "builtins", "abc", "typing", "torch"}  # whose classes have versions, not digests
KINDS = {
    "classification": ("Classification", "MultiLabel", "TokenClassification"),
    "language": ("CausalLM", "MaskedLM", "Seq2SeqLM", "Preference"),
}
_MISSING = "(nothing)"


def identity(task: Any) -> dict[str, Any]:
    """In JSON: the name, the settings, the version and the code of a task, which is None for one of unde's own.

    "source" is False if some code had no source to read, as in an interactive Python: it is told by its bytecode
    then, which another release of Python does not share.
    """
    classes = [c for c in type(task).__mro__ if package(c) not in _LIBRARIES]
    readers: list[Reader] = []

    def reader() -> Reader:
        readers.append(Reader([task, *classes]))
        return readers[-1]

    settings = {name: closed_code(reader().value(v, home)) for name, v, home in _settings(task, classes)}
    roots = ROOTS if classes else ()
    code = {name: _Methods(type(task), classes, reader()).definitions(name) for name in roots}
    return {
        "name": type(task).__name__,
        "settings": dict(sorted(settings.items())),
        "version": task.version,
        "code": {name: sealed(found) for name, found in code.items() if found} if classes else None,
        "source": all(reader.source for reader in readers),
    }


def _settings(task: Any, classes: list[type]) -> Iterator[tuple[str, Any, str]]:
    """The attributes of a task and of the user's classes, and the module where they are at home."""
    home = type(task).__module__
    if package(type(task.cutting)) != "unde":
        yield "cutting", task.cutting, home
    for cls in reversed(classes):
        for name, value in vars(cls).items():
            code = underlying(value) is not None or isinstance(value, type) or inspect.isdatadescriptor(value)
            if not (code or name in _ASIDE or name.startswith(("__", "_abc_"))):
                yield name, value, cls.__module__
    for name, value in attributes(task).items():
        if name not in _ASIDE:
            yield name, value, home


def kind_of(task: Mapping[str, Any]) -> str:
    """The kind of a task, by its identity: "classification", "language", "diffusion", or "" where it is not known.

    >>> kind_of({"name": "CausalLM", "settings": {}})
    'language'
    >>> kind_of({"name": "Mine", "settings": {"alphas": "…", "timesteps": 10}})
    'diffusion'
    """
    if {"alphas", "timesteps"} <= set(task.get("settings", ())):
        return "diffusion"
    return next((kind for kind, names in KINDS.items() if task.get("name") in names), "")


class _Methods:
    """The methods of the user's classes that are reached from one of them, each with its code."""

    def __init__(self, cls: type, classes: list[type], reader: Reader) -> None:
        self.cls, self.classes, self.reader = cls, classes, reader
        self.met = {*ROOTS}  # they are read on their own
        self.bases = {c.__name__ for c in cls.__mro__}

    def definitions(self, name: str) -> list[Any]:
        """Of one method: the one that is called, then those that it calls with super(), and what they reach."""
        self.met.add(name)
        found: list[Any] = []
        for cls in self.cls.__mro__:
            member = vars(cls).get(name)
            function = member if isinstance(member, type) else underlying(member)
            if function is None:
                continue
            if cls in self.classes:
                found.append(self.reader.value(function, cls.__module__))
            named = names(*_codes(function))
            for other in sorted(named.attributes | self.reader.attributes):
                code = [] if other in self.met else self.definitions(other)
                found += [{other: code}] if code else []
            if not named.globals & {"super", *self.bases}:
                break
        return found


def _codes(function: Any) -> Iterator[CodeType]:
    """The code of a function, and of the one inside that its decorators hide."""
    while function is not None:
        if isinstance(function, FunctionType):
            yield function.__code__
        function = getattr(function, "__wrapped__", None)


# --- two identities --------------------------------------------------------------------------------------


def same_but_code(old: dict[str, Any], new: dict[str, Any]) -> bool:
    """Whether two identities differ in their code at most."""
    plain = [{k: v for k, v in x.items() if k not in ("code", "source")} for x in (old, new)]
    return _same(*map(_without_code, plain))


def differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """What differs between two identities, in words.

    >>> a = {"name": "Mine", "settings": {"alpha": 0.1}, "version": 1, "code": {"loss": "8a"}, "source": True}
    >>> differences(a, a | {"settings": {"alpha": 0.2}, "code": {"loss": "3f"}})
    ['the code of loss() (another version)', 'setting alpha (0.1 there, 0.2 given)']
    """
    out = []
    if old["name"] != new["name"]:
        out.append(f"the task ({old['name']} there, {new['name']} given)")
    if old.get("version") != new.get("version"):
        out.append(f"the version of {new['name']} ({old.get('version')} there, {new.get('version')} given)")
    there, given = old.get("code") or {}, new.get("code") or {}
    unread = "; compared without its source, so that layout may count"
    said = "" if old.get("source") and new.get("source") else unread
    for name in ROOTS:
        if there.get(name) != given.get(name):
            lone = (how for how, side in (("only there", given), ("only given", there)) if name not in side)
            out.append(f"the code of {name}() ({next(lone, 'another version')}{said})")
    settings = [x.get("settings") or {} for x in (old, new)]
    for name in sorted({*settings[0], *settings[1]}):
        out += _differing(name, *(x.get(name, _MISSING) for x in settings))
    own = sorted(
        {*old, *new} - {"name", "version", "code", "source", "settings"}
    )  # of an identity() of one's own
    for name in own:
        out += _differing(name, *(x.get(name, _MISSING) for x in (old, new)))
    return out


def _differing(path: str, there: Any, given: Any) -> list[str]:
    """What differs in one setting, or in the parts of it that it is written out with."""
    if _same(there, given):
        return []
    if isinstance(there, dict) and isinstance(given, dict):
        if "$code" in there and "$code" in given and there["$code"] != given["$code"]:
            rest = [{k: v for k, v in x.items() if k != "$code"} for x in (there, given)]
            return [f"the code of {path} (another version)", *_differing(path, *rest)]
        if _kind(there) == _kind(given) is not None:
            pairs = {k: [x.get(k, _MISSING) for x in (there, given)] for k in sorted({*there, *given})}
            return [d for k, pair in pairs.items() for d in _differing(f"{path}.{k}", *pair)]
    if isinstance(there, list) and isinstance(given, list) and len(there) == len(given):
        parts = [d for i, pair in enumerate(zip(there, given)) for d in _differing(f"{path}[{i}]", *pair)]
        if any(isinstance(x, dict) for x in (*there, *given)):
            return parts
    word, shown = _word(given), [_shown(x) for x in (there, given)]
    how = "other content" if shown[0] == shown[1] else f"{shown[0]} there, {shown[1]} given"
    return [f"{word} {path} ({how})"]


def _kind(value: dict[str, Any]) -> str | None:
    """What a description is of, if its parts are worth comparing one by one."""
    marks = [k for k in value if k.startswith("$") and k not in ("$type", "$code")]
    return None if marks else value.get("$type", "")


def _word(value: Any) -> str:
    marked = value if isinstance(value, dict) else {}
    return "tensor" if "$tensor" in marked else "module" if "$module" in marked else "setting"


def _shown(value: Any) -> str:
    if value == _MISSING:
        return "none"
    if not isinstance(value, dict):
        text = repr(value)
        return text if len(text) <= 80 else text[:80] + "…"
    if "$list" in value:
        return f"a list of {value['of']}"
    if "$bytes" in value:
        return f"{value['of']} bytes"
    if "$tensor" in value or "$module" in value:
        return str(value["of"])
    if "$code" in value and "$type" not in value:
        return "a function"
    return str(next((value[k] for k in ("$number", "$name", "$type") if k in value), "a dict"))


def _without_code(tree: Any) -> Any:
    if isinstance(tree, list):
        return [_without_code(v) for v in tree]
    if not isinstance(tree, dict):
        return tree
    return {k: _without_code(v) for k, v in tree.items() if k != "$code"}


def _same(a: Any, b: Any) -> bool:
    """As JSON: for Python, 1 and True are equal."""
    return json.dumps(a, sort_keys=True) == json.dumps(b, sort_keys=True)
