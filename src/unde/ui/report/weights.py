"""Learned weights: one set group by group, or several sets side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from unde.console import counted
from unde.data import to_numpy
from unde.errors import UndeError
from unde.groups import unet_order, unet_stages
from unde.markup import Html, el, number
from unde.ui.report.svg import Bar, Line, bar_plot, block_tones, line_plot
from unde.ui.report.tables import ResultTable, bar, fold, lead, note, result_table, scroll, section
from unde.weights import Weights

_TOP = 10  # groups in the table of the largest weights
_RANKED = 5  # bars that carry their rank
_MAX_BLOCKS = 40
_ENOUGH_BLOCKS = 5  # a prefix with this many blocks is not made longer
_GROUPS_IN_A_BLOCK = 3  # groups in a block, on average, that justify a colour
_SQUASHED = 4  # a shared scale leaves the flattest set at least 1 / _SQUASHED of the height
MEANING = "A weight says how far a group of parameters is trusted when scores are added up; 1 is the unweighted method."


@dataclass(frozen=True, eq=False)
class WeightsPanel:
    """Learned weights: one value for each group, mean 1, so that 1 is the unweighted method.

    `blocks` names the block of each group and colours its bar; by default it follows from the names: Down, Mid and Up
    in a UNet of diffusers, else a prefix (`block_names`). `objective` is the learning objective, one value for each
    step or epoch. `name` identifies one of several sets on a page.

    >>> panel = WeightsPanel(["conv", "fc"], [0.5, 1.5], objective=[0.1, 0.3, 0.35])
    >>> panel.values
    array([0.5, 1.5])
    """

    groups: Sequence[str]
    values: Sequence[float] | np.ndarray
    blocks: Sequence[str] | None = None
    objective: Sequence[float] | np.ndarray | None = None
    note: str = ""
    name: str = ""

    def __post_init__(self) -> None:
        values = to_numpy(self.values).astype(np.float64)
        object.__setattr__(self, "values", values)
        if values.shape != (len(self.groups),) or not values.size:
            raise UndeError(
                f"{len(self.groups)} group names and weights of shape {values.shape}: expected one each"
            )
        if not np.isfinite(values).all() or (values < 0).any():
            worst = int(np.argmax(~np.isfinite(values) | (values < 0)))
            raise UndeError(
                f"the weight of group {self.groups[worst]!r} is {values[worst]}: expected a finite number ≥ 0"
            )
        if abs(values.mean() - 1) > 0.01:
            raise UndeError(
                f"the weights have mean {values.mean():.4g}: expected mean 1, so that 1 reads as unweighted. "
                "Divide them by their mean."
            )
        if self.blocks is not None and len(self.blocks) != len(self.groups):
            raise UndeError(
                f"{len(self.blocks)} block names for {len(self.groups)} groups: expected one each"
            )
        if self.objective is not None:
            object.__setattr__(self, "objective", to_numpy(self.objective).astype(np.float64))
            if not np.isfinite(self.objective).all():
                raise UndeError("the objective holds NaN or infinite values: only finite ones can be drawn")

    @property
    def array(self) -> np.ndarray:
        """The weights (M,)."""
        return np.asarray(self.values)


def block_names(groups: Sequence[str]) -> list[str] | None:
    """The block of each group: the shortest dotted prefix that separates a handful of blocks; None if there is none.

    >>> block_names(["net.stem.a", "net.stem.b", "net.body.0.a", "net.body.0.b", "net.body.1.a", "fc.a"])
    ['net', 'net', 'net', 'net', 'net', 'fc']
    >>> block_names(["a", "b", "c"]) is None
    True
    """
    paths = [name.split(".") for name in groups]
    limit = min(_MAX_BLOCKS, max(2, len(groups) // _GROUPS_IN_A_BLOCK))
    blocks: list[str] | None = None
    for depth in range(1, max(map(len, paths))):
        names = [".".join(path[: min(depth, max(1, len(path) - 1))]) for path in paths]
        if len(set(names)) > limit:
            break
        # A deeper prefix that separates nothing more only makes the names longer.
        if len(set(names)) > (1 if blocks is None else len(set(blocks))):
            blocks = names
        if blocks is not None and len(set(blocks)) >= _ENOUGH_BLOCKS:
            break
    return blocks


def arrange(panel: WeightsPanel) -> WeightsPanel:
    """Fill in the blocks; sort the groups of a UNet in the order in which an image passes them."""
    if panel.blocks is not None:
        return panel
    blocks = unet_stages(panel.groups)
    if blocks is None:
        return replace(panel, blocks=block_names(panel.groups))
    order = unet_order(blocks)
    return replace(
        panel,
        groups=[panel.groups[i] for i in order],
        values=panel.array[order],
        blocks=[blocks[i] for i in order],
    )


def order_of(panel: WeightsPanel) -> str:
    """The order that `arrange` gives, as text."""
    return (
        "in the order of the UNet" if panel.blocks is None and unet_stages(panel.groups) else "in model order"
    )


def short_names(names: Sequence[str]) -> dict[str, str]:
    """Cut names to their last parts: at least two, and as many as keep them distinct.

    >>> short_names(["resnet.encoder.stages.0", "resnet.encoder.stages.1", "fc"])
    {'resnet.encoder.stages.0': 'stages.0', 'resnet.encoder.stages.1': 'stages.1', 'fc': 'fc'}
    >>> short_names(["a.0.b.c", "a.1.b.c"])
    {'a.0.b.c': '0.b.c', 'a.1.b.c': '1.b.c'}
    """
    unique = dict.fromkeys(names)
    for parts in range(2, max(name.count(".") for name in unique) + 1):
        short = {name: ".".join(name.split(".")[-parts:]) for name in unique}
        if len(set(short.values())) == len(short):
            return short
    return {name: name for name in unique}


def weights_section(panels: Sequence[WeightsPanel]) -> Html:
    """The section with a plot of each set, the means of blocks, the largest weights and all of them as a table."""
    order, panels = order_of(panels[0]), [arrange(panel) for panel in panels]
    peaks = [max(1.0, float(panel.array.max())) for panel in panels]
    shared = max(peaks) if max(peaks) <= _SQUASHED * min(peaks) else None
    count, several = counted(len(panels[0].groups), "group"), len(panels) > 1
    words = f"{len(panels)} sets over the same {count}, {order}. " if several else f"{count}, {order}."
    if several:
        words += "All plots have one scale." if shared else "Each plot has its own scale."
    return section(
        "weights",
        f"Learned weights, {'set by set' if several else 'layer by layer'}",
        lead(f"{MEANING} {words}"),
        _block_key(panels[0]) if panels[0].blocks else None,
        el("div.sets" if several else "div", [_set(panel, order, shared, several) for panel in panels]),
        _means(panels) if panels[0].blocks else None,
        fold(f"All {count} {order}", _all_weights(panels))
        if len(panels[0].groups) > _TOP or several
        else None,
    )


def check_sets(panels: Sequence[WeightsPanel]) -> None:
    """Raise if sets cannot be shown side by side."""
    names = [panel.name for panel in panels]
    if "" in names:
        raise UndeError(
            f"set {names.index('')} of {len(panels)} sets of weights has no name: pass WeightsPanel(..., name=)"
        )
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise UndeError(f"two sets of weights are called {twice!r}: give each its own name")
    for panel in panels[1:]:
        if list(panel.groups) != list(panels[0].groups):
            raise UndeError(
                f"the weights {panel.name!r} are of other groups than {panels[0].name!r}: expected the same "
                f"{len(panels[0].groups)} groups in the same order"
            )


def _set(panel: WeightsPanel, order: str, highest: float | None, several: bool) -> Html:
    """One set: its plot, its largest weights, and the course of the objective if there is one."""
    count = len(panel.groups)
    rows = [
        [
            _code(panel.groups[i]),
            f"{panel.array[i]:.3f}",
            el("div.meter", bar(panel.array[i] / panel.array.max())),
        ]
        for i in _descending(panel)[:_TOP]
    ]
    table = result_table(ResultTable(f"Largest {min(_TOP, count)} of {count}", ["group", "weight", ""], rows))
    largest = el("div.pair", table, _objective(panel))
    title = f"Bar plot of the weights {panel.name}".strip() + f" of {counted(count, 'group')} {order}"
    plot = bar_plot(weight_bars(panel), title=title, highest=highest, compact=several)
    return el(
        "article.weight-set",
        el("h3", panel.name or "Weights"),
        note(f"From {in_words(panel.array)}"),
        note(panel.note),
        scroll(f"plot of {panel.name or 'all weights'}", plot, name="figure"),
        fold("Largest weights", largest) if several else largest,
    )


def _means(panels: Sequence[WeightsPanel]) -> Html:
    blocks = panels[0].blocks or ()
    short = short_names(blocks)
    rows = [
        [
            el("span", _swatch(tone), short[block], title=block),
            *(f"{panel.array[np.array(blocks) == block].mean():.2f}" for panel in panels),
        ]
        for block, tone in block_tones(blocks).items()
    ]
    return result_table(ResultTable("Mean weight by block", ["block", *_names(panels)], rows))


def _all_weights(panels: Sequence[WeightsPanel]) -> Html:
    rows = [
        [_code(group), *(f"{panel.array[i]:.3f}" for panel in panels)]
        for i, group in enumerate(panels[0].groups)
    ]
    return result_table(ResultTable("Weights", ["group", *_names(panels)], rows))


def _names(panels: Sequence[WeightsPanel]) -> list[str]:
    return [panel.name or "weight" for panel in panels]


def in_words(values: np.ndarray) -> str:
    """The range and the spread of weights, as text."""
    above, silent = int((values > 1).sum()), int((values < 0.01).sum())
    ordered, total = np.sort(values)[::-1], values.sum()
    half = int(np.searchsorted(np.cumsum(ordered), total / 2)) + 1
    words = (
        f"{number(values.min())} to {number(values.max())}: {above} of {counted(len(values), 'group')} lie above 1, "
        f"and half of the total is in the largest {half}."
    )
    return words + (f" Below 0.01, and hardly counting: {counted(silent, 'group')}." if silent else "")


def weight_bars(panel: WeightsPanel) -> list[Bar]:
    """A bar for each group; the largest carry their rank."""
    ranks = {group: str(rank) for rank, group in enumerate(_descending(panel)[:_RANKED], 1)}
    blocks = panel.blocks
    short = short_names(blocks) if blocks else {}
    bars = []
    for index, (name, value) in enumerate(zip(panel.groups, panel.values)):
        block = blocks[index] if blocks else ""
        label = name[len(block) + 1 :] if block and name.startswith(block + ".") else name
        where = f" ({block})" if block and not name.startswith(block) else ""
        bars.append(
            Bar(
                value=float(value),
                label=label,
                tooltip=f"{name}{where}: {number(value)}",
                block=short.get(block, ""),
                above=ranks.get(index, "") if len(panel.groups) > _RANKED else "",
            )
        )
    return bars


def _block_key(panel: WeightsPanel) -> Html:
    """The colours of the blocks."""
    short = short_names(panel.blocks or ())
    entries = [
        el("li", _swatch(tone), short[block], title=block)
        for block, tone in block_tones(panel.blocks or ()).items()
    ]
    return el("ul.blocks.key-line", entries, aria_label="colours of blocks")


def _swatch(tone: int) -> Html:
    return el(f"span.swatch.tone-{tone}", aria_hidden="true")


def _descending(panel: WeightsPanel) -> list[int]:
    """Positions of the groups, the largest weight first."""
    return np.argsort(-panel.array, kind="stable").tolist()


def _code(name: str) -> Html:
    """A dotted name that may break after its dots, and not within its words."""
    first, *others = name.split(".")
    return el("code", first, *((".", el("wbr"), word) for word in others))


def _objective(panel: WeightsPanel) -> Html | None:
    if panel.objective is None or not len(panel.objective):
        return None
    course, label = np.asarray(panel.objective), "objective"
    title = f"{label} while learning, from {number(course[0])} to {number(course[-1])}"
    line = Line(label, np.arange(1, len(course) + 1), course)
    plot = line_plot([line], title=title, x_label="step", y_label=label)
    caption = f"{number(course[0], 4)} at the start, {number(course[-1], 4)} at the end."
    return el("figure", el("h4", "Course of learning"), plot, el("figcaption", caption))


def weights_panel(weights: Weights, note: str = "", name: str = "") -> WeightsPanel:
    curve = weights.provenance.get("objective", {}).get("curve") or None
    return WeightsPanel(weights.groups, weights.values.numpy(), objective=curve, note=note, name=name)


def weights_panels(weights: Mapping[str, Weights], groups: Sequence[str]) -> list[WeightsPanel]:
    """A panel for each named set of weights, all in the order of `groups`."""
    return [
        weights_panel(replace(w, values=w.aligned_to(groups), groups=list(groups)), name=name)
        for name, w in weights.items()
    ]
