"""Where parameters and groups sit in a UNet of diffusers, read from their names.

Names are understood with whatever stands around them: of LoRA by PEFT ("base_model.model.….to_q.lora_A.default"), of
files with underscores for dots ("lora_unet_down_blocks_0_…"), and of consecutive groups ("017:down_blocks.0.…").
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from unde.errors import UndeError

STAGES = {"down_blocks": "Down", "mid_block": "Mid", "up_blocks": "Up"}
OTHER = "Other"  # what lies outside the three: the first and last convolution, the time embedding
OUTSIDE = "(no block)"
_WRITTEN = r"((?:down|up)_blocks{0}\d+|mid_block)(?:{0}(.+))?$"  # a block, and what of it
_PLACE = re.compile(r"(?:^|[.:])" + _WRITTEN.format(r"\."))
_STAGE = re.compile(r"(?:^|[.:_])" + _WRITTEN.format("[._]"))
_ADAPTER = re.compile(r"(?:\.lora_|_lora\.).*")
_NO_BLOCK = re.compile(r"(?:^|[.:])(conv_in|conv_norm_out|conv_out|\w+_embedding|encoder_hid_proj)(?:\.|$)")
_UNTOLD = {"weight", "bias", "base_layer", "processor", "transformer_blocks"}


def block(name: str) -> str:
    """The block of a parameter; the first part of its name if it is outside of all blocks.

    >>> block("unet.up_blocks.1.resnets.0.conv1.bias"), block("mid_block.resnets.0"), block("conv_in.weight")
    ('up_blocks.1', 'mid_block', 'conv_in')
    """
    found = _PLACE.search(name)
    return name.partition(".")[0] if found is None else found[1]


def unet_cell(name: str) -> tuple[str, str]:
    """Block and component of a parameter of a UNet of diffusers, with or without LoRA.

    >>> unet_cell("up_blocks.1.attentions.0.transformer_blocks.0.attn2.to_out.0.lora_A.default.weight")
    ('up_blocks.1', 'attn2.to_out')
    >>> unet_cell("mid_block.resnets.0.conv1.bias"), unet_cell("conv_in.weight")
    (('mid_block', 'resnets.conv1'), ('(no block)', 'conv_in'))
    """
    found = _PLACE.search(name)
    if found is None:
        outside = _NO_BLOCK.search(name)
        if outside is None:
            raise UndeError(
                f"{name!r} is not a parameter of a UNet of diffusers: expected down_blocks, mid_block or up_blocks in "
                "its name. Pass cells=, a function from a name to (row, column) or a regular expression for each"
            )
        return OUTSIDE, outside[1]
    steps = _ADAPTER.sub("", found[2] or "").split(".")
    steps = [s for s in steps if s and not s.isdigit() and s not in _UNTOLD]
    if "ff" in steps:
        return found[1], "ff"
    if len(steps) > 1 and re.fullmatch(r"attn\d*", steps[1]):  # a layer of a transformer in "attentions"
        steps = steps[1:]
    return found[1], ".".join(steps) or "all"


def stages(groups: Sequence[str]) -> list[str] | None:
    """Down, Mid, Up or Other for each group; None if these are not the groups of a UNet.

    >>> stages(["conv_in", "unet.down_blocks.0.resnets.0", "up_blocks.0.attentions.1.proj_in", "mid_block.resnets.0"])
    ['Other', 'Down', 'Up', 'Mid']
    >>> stages(["model.layers.0.mlp", "model.layers.1.mlp"]) is None
    True
    """
    matches = [_STAGE.search(group) for group in groups]
    found = [OTHER if m is None else STAGES[re.sub(r"[._]\d+$", "", m[1])] for m in matches]
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
