"""Where parameter groups sit in a UNet of diffusers, read from their names.

Names are understood with whatever stands around them: of LoRA by PEFT ("base_model.model.….to_q.lora_A.default"), of
files with underscores for dots ("lora_unet_down_blocks_0_…"), and of consecutive groups ("017:down_blocks.0.…").
"""

from __future__ import annotations

import re
from collections.abc import Sequence

STAGES = {"down_blocks": "Down", "mid_block": "Mid", "up_blocks": "Up"}
OTHER = "Other"  # what lies outside the three: the first and last convolution, the time embedding
_STAGE = re.compile(r"(?:^|[.:_])((?:down|up)_blocks(?=[._]\d)|mid_block(?=[._]|$))")


def stages(groups: Sequence[str]) -> list[str] | None:
    """Down, Mid, Up or Other for each group; None if these are not the groups of a UNet.

    >>> stages(["conv_in", "unet.down_blocks.0.resnets.0", "up_blocks.0.attentions.1.proj_in", "mid_block.resnets.0"])
    ['Other', 'Down', 'Up', 'Mid']
    >>> stages(["model.layers.0.mlp", "model.layers.1.mlp"]) is None
    True
    """
    found = [STAGES[match[1]] if (match := _STAGE.search(group)) else OTHER for group in groups]
    return found if {"Down", "Up"} <= set(found) else None


def flow(places: Sequence[str]) -> list[int]:
    """The order in which an image runs through groups in these stages: diffusers lists the middle of a UNet last.

    >>> flow(["Other", "Down", "Up", "Mid", "Other"])
    [0, 1, 3, 2, 4]
    """
    first = next(i for i, stage in enumerate(places) if stage != OTHER)
    known = list(STAGES.values())

    def rank(i: int) -> int:
        return known.index(places[i]) if places[i] != OTHER else -1 if i < first else len(known)

    return sorted(range(len(places)), key=rank)
