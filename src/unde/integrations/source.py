"""What an index of a Hugging Face model was built from, remembered beside it: no flag is given twice."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from unde.errors import UndeError
from unde.files import write_atomically

FILE = "source.json"


@dataclass(frozen=True)
class Source:
    """A model, its training texts, and how they are read; None is what was not said."""

    model: str | None = None
    data: str | None = None
    text_field: str | None = None
    seq_len: int | None = None

    @property
    def said(self) -> dict[str, str | int]:
        return {name: value for name, value in asdict(self).items() if value is not None}

    def settled(self, index: Path | None) -> Source:
        """With what the index remembers for all that was not said, and checked to be enough."""
        if index is not None and not index.is_dir():
            raise UndeError(f"no folder {index}: make an index with unde build")
        there = _read(index) if index is not None else Source()
        for flag, said, found in (("hf-model", self.model, there.model), ("data", self.data, there.data)):
            if said is None and found is not None and Path(found).is_absolute() and not Path(found).exists():
                raise UndeError(
                    f"{index} was built from {found}, which is gone: say where it is now (--{flag})"
                )
        whole = replace(there, **self.said)
        if whole.model is not None and whole.data is not None:
            return whole
        if whole.model is not None:
            raise UndeError(f"--hf-model {whole.model} needs --data FILE: the texts that it was trained on")
        if whole.data is not None:
            raise UndeError(f"--data {whole.data} needs --hf-model DIR: the model that was trained on it")
        raise UndeError(
            "name a model and its training data: MODULE:FUNCTION (a function that returns an unde.Setup), or "
            "--hf-model DIR with --data FILE.jsonl"
            + (
                ""
                if index is None
                else f". {index} remembers none: it is not finished, or was not built with --hf-model"
            )
        )

    def remember(self, index: Path) -> None:
        """Keep this in the folder of an index, with paths that hold from any working folder."""
        settings = asdict(self)
        for name in ("model", "data"):
            path = Path(settings[name]).expanduser()
            settings[name] = str(path.absolute()) if path.exists() else settings[name]
        write_atomically(index / FILE, (json.dumps(settings, indent=1) + "\n").encode())


def _read(index: Path) -> Source:
    path = index / FILE
    if not path.exists():
        return Source()
    known = {field.name for field in fields(Source)}
    try:
        found = Source(**{k: v for k, v in json.loads(path.read_text()).items() if k in known})
        texts, length = (found.model, found.data, found.text_field), found.seq_len
        if not all(isinstance(x, (str, type(None))) for x in texts) or not isinstance(
            length, (int, type(None))
        ):
            raise TypeError("a value of another type")
    except (ValueError, TypeError, AttributeError) as e:
        raise UndeError(f"{path} is damaged ({e}): delete it, and give --hf-model and --data") from None
    return found
