"""What is a single parameter group worth? LDS from each group, block and component alone.

Scores of every method are made from one group, or from all groups of a block (a stage, a layer, a resolution of a UNet)
or of a component (a kind of projection) alone. No weights are learned.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import torch

from experiments.shared import cells
from experiments.shared.cells import Cell
from experiments.shared.crossfit import predicted, resolved
from experiments.shared.sweep import EVERY_BANK
from unde.evaluate import lds, unet_cell

PAPER = "Figures 1 and 6a"
VARIANTS = EVERY_BANK
OUTSIDE = "(no block)"


def place(name: str) -> tuple[str, str]:
    """Block and component of a layer or parameter: its name up to the first number, and the words behind it.

    >>> place("transformer.h.3.attn.c_proj"), place("transformer.h.3.attn.c_proj.bias"), place("vit.layernorm")
    (('transformer.h.3', 'attn.c_proj'), ('transformer.h.3', 'attn.c_proj'), ('(no block)', 'vit.layernorm'))
    """
    name = re.sub(r"\.(weight|bias|cls_token|position_embeddings)$", "", name)
    found = re.match(r"(.*?\.\d+)\.(.+)", name)
    if found is None:
        return OUTSIDE, name
    words = [word for word in found[2].split(".") if not word.isdigit()]
    return found[1], ".".join(words)


def run(variant: str) -> dict[str, Any]:
    return measure(cells.get(variant))


def measure(cell: Cell) -> dict[str, Any]:
    """LDS as a pair: mean, and half width of its 95 % interval over queries."""
    masks, utility = cell.bank.masks, cell.bank.utility["eval"]
    results: dict[str, Any] = {}
    for title in cell.methods:
        scores = cell.eval_scores(title)
        where = unet_cell if any("_block" in name for name in scores.groups) else place
        block, component = ({name: where(name)[i] for name in scores.groups} for i in (0, 1))
        parts = {"groups": {name: name for name in scores.groups}, "blocks": block, "components": component}
        results[title] = {"all": cell.lds(scores.total()).as_dict(), "block of": block}
        groups = resolved(scores, masks) if scores.method.linear else None  # (S, Q, M)
        for what, part_of in parts.items():
            names = list(dict.fromkeys(part_of.values()))
            chosen = np.array([[part_of[g] == name for g in scores.groups] for name in names])
            if groups is None:
                alone = predicted(scores, masks, torch.from_numpy(chosen).float())
            else:
                alone = np.einsum("sqm,cm->csq", groups, chosen, optimize=True)
            found = [lds(p.T, np.eye(len(masks), dtype=bool), utility) for p in alone]
            results[title][what] = {n: [e.mean, e.ci95] for n, e in zip(names, found, strict=True)}
        best = max(results[title]["blocks"], key=lambda name: results[title]["blocks"][name][0])
        print(f"{title}: best block {best}, LDS {100 * results[title]['blocks'][best][0]:.2f} %", flush=True)
    return results
