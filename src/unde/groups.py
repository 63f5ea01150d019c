"""Groups: a partition of a model's trainable parameters into M named groups."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from unde.errors import UndeError, unknown


def unwrap_compiled(model: nn.Module) -> nn.Module:
    """The model inside torch.compile, whose parameters have their original names; or the model itself."""
    while isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
        model = inner
    return model


def trainable(model: nn.Module, exclude: Iterable[str] = ()) -> list[str]:
    """Names of the parameters to attribute to: those that require grad and match no regex of `exclude`."""
    model = unwrap_compiled(model)
    patterns = _compile(exclude)
    names = [n for n, p in model.named_parameters() if p.requires_grad]
    if not names:
        if adapters := [n for n, _ in model.named_parameters() if "lora_" in n]:
            raise UndeError(
                f"the model has no trainable parameter: its {len(adapters)} adapter parameters ({_some(adapters, 1)}) "
                "are frozen for inference. Load them with PeftModel.from_pretrained(..., is_trainable=True), make them "
                "with inference_mode=False, or set requires_grad=True on them"
            )
        raise UndeError(
            "the model has no trainable parameter: every requires_grad is False. "
            "Set requires_grad=True on the parameters that were trained"
        )
    for pattern in patterns:
        if not any(pattern.search(n) for n in names):
            raise UndeError(
                f"exclude pattern {pattern.pattern!r} matches no trainable parameter: {_some(names)}"
            )
    names = [n for n in names if not any(p.search(n) for p in patterns)]
    if not names:
        raise UndeError("exclude leaves no trainable parameter: expected at least one")
    return names


@dataclass(frozen=True)
class Groups:
    """M named, disjoint sets of parameter names that together cover all that is attributed.

    >>> model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    >>> Groups.by_layer(model).names
    ('0', '1')
    >>> Groups.by_pattern(model, {"weights": r"weight$", "biases": r"bias$"}).members["biases"]
    ('0.bias', '1.bias')
    """

    members: Mapping[str, tuple[str, ...]]

    def __post_init__(self) -> None:
        seen: dict[str, str] = {}
        for group, params in self.members.items():
            if not params:
                raise UndeError(f"group {group!r} has no parameter: every group needs at least one")
            for param in params:
                if param in seen:
                    raise UndeError(
                        f"parameter {param!r} is in groups {seen[param]!r} and {group!r}: expected one"
                    )
                seen[param] = group

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.members)

    @property
    def parameters(self) -> tuple[str, ...]:
        return tuple(p for params in self.members.values() for p in params)

    def __len__(self) -> int:
        return len(self.members)

    def of(self, parameters: Sequence[str]) -> list[int]:
        """The group number of each parameter, after checking that the partition covers exactly these."""
        where = {p: j for j, params in enumerate(self.members.values()) for p in params}
        missing = [p for p in parameters if p not in where]
        faults = {"leave out": missing, "name unknown": sorted(set(where) - set(parameters))}
        parts = [f"{fault} {_some(names)}" for fault, names in faults.items() if names]
        if parts:
            raise UndeError(
                f"the groups do not fit the {len(parameters)} attributed parameters: they {' and '.join(parts)}. "
                "Every trainable parameter needs a group, or name it in exclude=[regex]"
            )
        return [where[p] for p in parameters]

    def merge(self, names: Mapping[str, Sequence[str]]) -> Groups:
        """Coarser groups, {new name: names of present groups}.

        >>> Groups({"a": ("w",), "b": ("v", "u")}).merge({"both": ["a", "b"]}).members
        {'both': ('w', 'v', 'u')}
        """
        for name in (name for old in names.values() for name in old):
            if name not in self.members:
                raise unknown("group", name, self.names)
        return Groups({new: tuple(p for g in old for p in self.members[g]) for new, old in names.items()})

    @classmethod
    def by_tensor(cls, model: nn.Module, *, exclude: Iterable[str] = ()) -> Groups:
        """One group for each parameter tensor.

        Args:
            model: The model.
            exclude: Regular expressions of parameters to leave out.

        Returns:
            The groups, named by their tensor.

        >>> Groups.by_tensor(nn.Linear(2, 1)).names
        ('weight', 'bias')
        """
        return cls({n: (n,) for n in trainable(model, exclude)})

    @classmethod
    def by_layer(cls, model: nn.Module, *, exclude: Iterable[str] = ()) -> Groups:
        """One group for each module: its weight and bias together.

        Args:
            model: The model.
            exclude: Regular expressions of parameters to leave out.

        Returns:
            The groups, named by their module. A parameter of the model itself is a group of its own name; a model
            that is one layer is one group.

        >>> Groups.by_layer(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))).names
        ('0', '1')
        >>> Groups.by_layer(nn.Linear(2, 3)).names
        ('Linear',)
        """
        layers: dict[str, list[str]] = {}
        names, bare = trainable(model, exclude), unwrap_compiled(model)
        if not any("." in n for n, _ in bare.named_parameters()):
            return cls({type(bare).__name__: tuple(names)})
        for n in names:
            layers.setdefault(n.rpartition(".")[0] or n, []).append(n)
        return cls({k: tuple(v) for k, v in layers.items()})

    @classmethod
    def consecutive(cls, model: nn.Module, count: int, *, exclude: Iterable[str] = ()) -> Groups:
        """Runs of consecutive parameter tensors, as equal in number as can be (the paper's 128 and 256).

        Args:
            model: The model.
            count: The number of groups.
            exclude: Regular expressions of parameters to leave out.

        Returns:
            The groups, named by position and first tensor.

        Raises:
            UndeError: If there are fewer tensors than groups.

        >>> Groups.consecutive(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)), 2).names
        ('0:0.weight', '1:1.weight')
        """
        names = trainable(model, exclude)
        if not 1 <= count <= len(names):
            raise UndeError(
                f"cannot form {count} consecutive groups: expected 1 to {len(names)}, one per tensor"
            )
        cuts = [round(j * len(names) / count) for j in range(count + 1)]
        width = len(str(count - 1))
        return cls(
            {f"{j:0{width}d}:{names[a]}": tuple(names[a:b]) for j, (a, b) in enumerate(zip(cuts, cuts[1:]))}
        )

    @classmethod
    def by_pattern(
        cls, model: nn.Module, patterns: Mapping[str, str], *, exclude: Iterable[str] = ()
    ) -> Groups:
        """One group for each regular expression.

        Args:
            model: The model.
            patterns: {name of the group: regex}. Every parameter must match exactly one, by `re.search`.
            exclude: Regular expressions of parameters to leave out.

        Returns:
            The groups.

        Raises:
            UndeError: If a parameter matches no pattern, or several.

        >>> Groups.by_pattern(nn.Linear(2, 1), {"matrix": "weight", "vector": "bias"}).names
        ('matrix', 'vector')
        """
        compiled = dict(zip(patterns, _compile(patterns.values())))
        members: dict[str, list[str]] = {name: [] for name in patterns}
        orphans = []
        for n in trainable(model, exclude):
            hits = [name for name, regex in compiled.items() if regex.search(n)]
            if len(hits) > 1:
                raise UndeError(f"parameter {n!r} matches the patterns of {hits}: expected exactly one")
            if hits:
                members[hits[0]].append(n)
            else:
                orphans.append(n)
        if orphans:
            raise UndeError(
                f"{len(orphans)} parameters match no pattern: {_some(orphans)}. Add a pattern or name them in exclude"
            )
        return cls({k: tuple(v) for k, v in members.items()})

    @classmethod
    def parse(
        cls, groups: Groups | str | Mapping[str, str], model: nn.Module, exclude: Iterable[str] = ()
    ) -> Groups:
        """Groups as given, or from a short name: 'tensor', 'layer', 'consecutive(128)', or {name: regex}."""
        if isinstance(groups, Groups):
            return groups
        if isinstance(groups, Mapping):
            return cls.by_pattern(model, groups, exclude=exclude)
        match = re.fullmatch(r"consecutive\((\d+)\)", groups)
        if match:
            return cls.consecutive(model, int(match[1]), exclude=exclude)
        if groups == "tensor":
            return cls.by_tensor(model, exclude=exclude)
        if groups == "layer":
            return cls.by_layer(model, exclude=exclude)
        raise unknown("groups", groups, ("tensor", "layer", "consecutive(128)"))


def _compile(patterns: Iterable[str]) -> list[re.Pattern[str]]:
    if isinstance(patterns, str):
        raise UndeError(
            f"expected a list of regular expressions, got the string {patterns!r}: write [{patterns!r}]"
        )
    out = []
    for p in patterns:
        try:
            out.append(re.compile(p))
        except re.error as e:
            raise UndeError(f"{p!r} is not a regular expression: {e}") from None
    return out


def _some(names: Sequence[str], show: int = 6) -> str:
    more = f" and {len(names) - show} more" if len(names) > show else ""
    return ", ".join(map(repr, names[:show])) + more


STAGES = {"down_blocks": "Down", "mid_block": "Mid", "up_blocks": "Up"}
OTHER = "Other"  # what lies outside the three: the first and last convolution, the time embedding
OUTSIDE = "(no block)"
_WRITTEN = r"((?:down|up)_blocks{0}\d+|mid_block)(?:{0}(.+))?$"  # a block, and what of it
_PLACE = re.compile(r"(?:^|[.:])" + _WRITTEN.format(r"\."))
_STAGE = re.compile(r"(?:^|[.:_])" + _WRITTEN.format("[._]"))
_ADAPTER = re.compile(r"(?:\.lora_|_lora\.).*")
_NO_BLOCK = re.compile(r"(?:^|[.:])(conv_in|conv_norm_out|conv_out|\w+_embedding|encoder_hid_proj)(?:\.|$)")
_UNTOLD = {"weight", "bias", "base_layer", "processor", "transformer_blocks"}


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


def unet_stages(groups: Sequence[str]) -> list[str] | None:
    """Down, Mid, Up or Other for each group; None if these are not the groups of a UNet.

    >>> unet_stages(["conv_in", "unet.down_blocks.0.resnets.0", "up_blocks.0.attentions.1.proj_in", "mid_block.x"])
    ['Other', 'Down', 'Up', 'Mid']
    >>> unet_stages(["model.layers.0.mlp", "model.layers.1.mlp"]) is None
    True
    """
    matches = [_STAGE.search(group) for group in groups]
    found = [OTHER if m is None else STAGES[re.sub(r"[._]\d+$", "", m[1])] for m in matches]
    return found if {"Down", "Up"} <= set(found) else None


def unet_order(places: Sequence[str]) -> list[int]:
    """The order in which an image runs through groups in these stages: diffusers lists the middle of a UNet last.

    >>> unet_order(["Other", "Down", "Up", "Mid", "Other"])
    [0, 1, 3, 2, 4]
    """
    first = next(i for i, stage in enumerate(places) if stage != OTHER)
    known = list(STAGES.values())

    def rank(i: int) -> int:
        return known.index(places[i]) if places[i] != OTHER else -1 if i < first else len(known)

    return sorted(range(len(places)), key=rank)
