"""The card of an index: a README.md in its folder that says what it was made from and how to ask it."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import PurePath

from unde import methods
from unde.errors import UndeError
from unde.index.calibration import Calibration
from unde.store import layout
from unde.store.files import read_json, write_bytes
from unde.store.manifest import Manifest
from unde.store.remote import StorePath, exists
from unde.version import __version__

MARK = "<!-- written by unde push -->"


def make_card(folder: StorePath) -> str:
    """The card of an index, in Markdown with the header that model hubs read."""
    m, name, source = Manifest.read(folder), folder.name, _source(folder)
    model = PurePath(source["model"]).name if "model" in source else source.get("target", "a PyTorch model")
    data = f" of {PurePath(source['data']).name}" if "data" in source else ""
    several = f", {m.terms} checkpoints or steps" if m.terms > 1 else ""
    facts = {
        "model": f"{model}: {len(m.units)} parameters (tensors) in {len(m.groups)} groups{several}",
        "fingerprint of the weights": ", ".join(f"`{print_}`" for print_ in m.models[:4])
        + (f" and {len(m.models) - 4} more" if m.models[4:] else ""),
        "task": str(m.task["name"]),
        "training data": f"{m.examples:,} examples{data}"
        + ("" if m.changes is None else f" ({m.changes.summary})"),
        "method": str(methods.parse(m.method)),
        "features": f"{m.width:,} numbers for each example and checkpoint, {m.store_dtype}",
        "calibration": _calibration(folder, m.id),
        "made with": f"unde {__version__}",
    }
    rows = "\n".join(f"| {key} | {_cell(value)} |" for key, value in facts.items())
    named = source.get("target") or "my_project.setup:make"
    ask = f"unde attribute {named} --index {name}"
    if "model" in source:
        ask = f'unde attribute --index {name} --hf-model DIR --data FILE --query "some text"'
    return f"""---
library_name: unde
tags:
- training-data-attribution
---
{MARK}
# {name}: which training examples made the model do that?

An index of [unde](https://github.com/unde-attribution/unde): gradient features of the training examples of a model, to
be compared with those of any query.

| | |
|---|---|
{rows}

## How to ask

```sh
pip install unde
unde pull URL {name}
{ask}
```

```python
import unde

index = unde.Index.open("{name}", model=model, task=task, train_data=train_data)
print(index.score(queries).top(10))
```

The model has to be the one of the fingerprint: another one is refused. Texts and images of the training data are not in
the index. Gradients are: what can be learned about an example from its gradient is in what you share.
"""


def write_card(folder: StorePath) -> bool:
    """Write README.md into the folder of an index; False if there is one that somebody else wrote."""
    path = folder / layout.CARD
    if exists(path) and MARK.encode() not in path.read_bytes():
        return False
    write_bytes(path, make_card(folder).encode())
    return True


def _source(folder: StorePath) -> dict[str, str]:
    """What the index was built from, as far as the command line recorded it."""
    content: object = {}
    with suppress(OSError, ValueError, json.JSONDecodeError):
        if exists(folder / layout.SOURCE):
            content = read_json(folder / layout.SOURCE)
    return {k: v for k, v in content.items() if isinstance(v, str)} if isinstance(content, dict) else {}


def _calibration(folder: StorePath, index: str) -> str:
    if exists(folder / layout.CALIBRATION):
        with suppress(UndeError):
            calibration = Calibration.load(folder / layout.CALIBRATION)
            return str(calibration) if calibration.index == index else "one of an earlier state, not used"
    return "none: how well its scores predict retrained models was not measured (`unde calibrate`)"


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "/").split())
