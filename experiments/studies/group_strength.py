"""What is a single parameter group worth? LDS from each group, block and component alone.

Scores of every method are made from one group, or from all groups of a block (a stage, a layer, a resolution of a UNet)
or of a component (a kind of projection) alone. No weights are learned.
"""

from __future__ import annotations

import re
from typing import Any

from experiments.shared.sweep import EVERY_BANK
from unde.evaluate import lds_strength, unet_cell

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
    from experiments.shared import cells

    cell = cells.get(variant)
    retrained, where = cell.bank, unet_cell if cell.domain == "diffusion" else place
    truth = retrained.masks, retrained.utility["eval"]
    results: dict[str, Any] = {}
    for title in cell.methods:
        scores = cell.eval_scores(title)
        alone = lds_strength(scores, *truth, cells=None)
        blocks = lds_strength(scores, *truth, cells=lambda name: (where(name)[0], "all"))
        components = lds_strength(scores, *truth, cells=lambda name: (where(name)[1], "all"))
        results[title] = {
            "all": cell.lds(scores.total()).as_dict(),
            "groups": dict(zip(alone.rows, alone.values[:, 0].tolist())),
            "block of": {name: where(name)[0] for name in alone.rows},
            "blocks": dict(zip(blocks.rows, blocks.values[:, 0].tolist())),
            "components": dict(zip(components.rows, components.values[:, 0].tolist())),
        }
        best = max(results[title]["blocks"], key=results[title]["blocks"].get)
        print(f"{title}: best block {best}, LDS {100 * results[title]['blocks'][best]:.2f} %", flush=True)
    return results
