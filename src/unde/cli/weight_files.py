"""`--weights [NAME=]FILE`, several times."""

from __future__ import annotations

import os
from collections.abc import Sequence

from unde.errors import UndeError
from unde.store.remote import StorePath, place

UNWEIGHTED = "unweighted"  # the name of scores without weights


def parse_weight_files(texts: Sequence[str]) -> dict[str, StorePath]:
    """Parse files of weights by name: one path is "weighted", several are NAME=FILE each.

    >>> parse_weight_files(["subject=w1.json", "style=w2.json"])["style"].name
    'w2.json'
    """
    files: dict[str, StorePath] = {}
    for text in texts:
        name, equals, file = text.partition("=")
        # A path may hold the sign too, as in runs/lr=0.1/w.json.
        if not equals or os.sep in name or os.path.exists(text):
            if len(texts) > 1:
                raise UndeError(
                    f"--weights {text} has no name: with several, name each, as in --weights subject={text}"
                )
            name, file = "weighted", text
        if not name or not file:
            raise UndeError(f"cannot read --weights {text}: expected FILE or NAME=FILE, such as style=w.json")
        if name in files:
            raise UndeError(f"--weights {name}=… is given twice: give each set a name of its own")
        if name == UNWEIGHTED:
            raise UndeError(
                f"--weights {text}: {UNWEIGHTED!r} names the scores without weights, choose another"
            )
        files[name] = place(file)
    return files
