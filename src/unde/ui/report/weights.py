"""The learned weights, group by group in model order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from unde.console import counted
from unde.data import to_numpy
from unde.errors import UndeError
from unde.groups import unet_order, unet_stages
from unde.markup import Html, el, number
from unde.ui.report.svg import Bar, Line, bar_plot, block_tones, line_plot

_TOP = 10  # groups in the table of the largest weights
_RANKED = 5  # bars that carry their rank
_MAX_BLOCKS = 40
_ENOUGH_BLOCKS = 5  # a prefix with this many blocks is not made longer
_GROUPS_IN_A_BLOCK = 3  # blocks are worth a colour when they hold this many groups on average


@dataclass(frozen=True, eq=False)
class WeightsPanel:
    """Learned weights: one value for each group, mean 1, so that 1 is the unweighted method.

    `blocks` names the block of each group and colours its bar; without it, blocks are found from the names: Down,
    Mid and Up in a UNet of diffusers, else by prefix (`block_names`). `objective` is the course of the learning
    objective, one value for each step or epoch. `name` tells several sets of weights on one page apart.

    >>> panel = WeightsPanel(["conv", "fc"], [0.5, 1.5], objective=[0.1, 0.3, 0.35])
    >>> panel.values
    array([0.5, 1.5])
    """

    groups: Sequence[str]
    values: Sequence[float] | np.ndarray
    blocks: Sequence[str] | None = None
    objective: Sequence[float] | np.ndarray | None = None
    objective_label: str = "objective"
    objective_steps: str = "step"
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


def block_names(groups: Sequence[str]) -> list[str] | None:
    """The block of each group: the shortest dotted prefix that tells a handful of blocks apart.

    A prefix that leaves hardly any groups together is not taken, and None means that no prefix helps.

    >>> block_names(["net.stem.a", "net.stem.b", "net.body.0.a", "net.body.0.b", "net.body.1.a", "fc.a"])
    ['net', 'net', 'net', 'net', 'net', 'fc']
    >>> block_names(["a", "b", "c"]) is None
    True
    """
    paths = [name.split(".") for name in groups]
    limit = min(_MAX_BLOCKS, max(2, len(groups) // _GROUPS_IN_A_BLOCK))
    found: list[str] | None = None
    for depth in range(1, max(map(len, paths))):
        names = [".".join(path[: min(depth, max(1, len(path) - 1))]) for path in paths]
        if len(set(names)) > limit:
            break
        # A deeper prefix that separates nothing more only makes the names longer.
        if len(set(names)) > (1 if found is None else len(set(found))):
            found = names
        if found is not None and len(set(found)) >= _ENOUGH_BLOCKS:
            break
    return found


def arranged(panel: WeightsPanel) -> WeightsPanel:
    """The panel with its blocks; the groups of a UNet in the order in which an image runs through them."""
    if panel.blocks is not None:
        return panel
    found = unet_stages(panel.groups)
    if found is None:
        return replace(panel, blocks=block_names(panel.groups))
    order = unet_order(found)
    return replace(
        panel,
        groups=[panel.groups[i] for i in order],
        values=np.asarray(panel.values)[order],
        blocks=[found[i] for i in order],
    )


def order_of(panel: WeightsPanel) -> str:
    """In words, the order that `arranged` gives."""
    return (
        "in the order of the UNet" if panel.blocks is None and unet_stages(panel.groups) else "in model order"
    )


def short_names(names: Sequence[str]) -> dict[str, str]:
    """Names cut to as few of their last parts, but two at least, as keep them apart.

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


def weights_section(panel: WeightsPanel) -> Html:
    """The section with the plot of all weights, the largest ones as a table and the objective's course."""
    places = order_of(panel)
    panel = arranged(panel)
    values, blocks = np.asarray(panel.values), panel.blocks
    order = np.argsort(-values, kind="stable")
    return el(
        "section",
        {"id": "weights", "aria-labelledby": "weights-title"},
        el("h2", {"id": "weights-title"}, "Learned weights, layer by layer"),
        el("p", {"class": "lead"}, f"{MEANING} Here weights run from {in_words(values)}"),
        el("p", {"class": "note"}, panel.note) if panel.note else None,
        el(
            "figure",
            {"class": "scroll", "tabindex": "0", "role": "region", "aria-label": "plot of all weights"},
            bar_plot(
                bars(panel, order),
                title=f"Bar plot of the weights of {counted(len(values), 'group')} {places}",
                reference=1.0,
                reference_label="uniform",
            ),
        ),
        _block_legend(list(blocks), values) if blocks else None,
        largest(panel, order, "h3"),
        el(
            "details",
            {"class": "fold"},
            el("summary", None, f"All {counted(len(values), 'group')} {places}"),
            _table(panel, np.arange(len(values))),
        )
        if len(values) > _TOP
        else None,
    )


MEANING = "A weight says how far a group of parameters is trusted when scores are added up; 1 is the unweighted method."


def in_words(values: np.ndarray) -> str:
    """How weights are spread, from their range on."""
    above, silent = int((values > 1).sum()), int((values < 0.01).sum())
    ordered, total = np.sort(values)[::-1], values.sum()
    half = int(np.searchsorted(np.cumsum(ordered), total / 2)) + 1
    words = (
        f"{number(values.min())} to {number(values.max())}: {above} of {counted(len(values), 'group')} lie above 1, "
        f"and half of the total is in the largest {half}."
    )
    return words + (f" Below 0.01, and so hardly counting: {counted(silent, 'group')}." if silent else "")


def bars(panel: WeightsPanel, order: np.ndarray) -> list[Bar]:
    """A bar for each group of an arranged panel; the first ones in `order` carry their rank."""
    ranks = {int(group): str(rank) for rank, group in enumerate(order[:_RANKED], 1)}
    blocks = panel.blocks
    short = short_names(blocks) if blocks else {}
    made = []
    for index, (name, value) in enumerate(zip(panel.groups, panel.values)):
        block = blocks[index] if blocks else ""
        label = name[len(block) + 1 :] if block and name.startswith(block + ".") else name
        where = f" ({block})" if block and not name.startswith(block) else ""
        made.append(
            Bar(
                value=float(value),
                label=label,
                tooltip=f"{name}{where}: {number(value)}",
                block=short.get(block, ""),
                above=ranks.get(index, "") if len(panel.groups) > _RANKED else "",
            )
        )
    return made


def _block_legend(blocks: list[str], values: np.ndarray) -> Html:
    short, tones = short_names(blocks), block_tones(blocks)
    entries = []
    for block, tone in tones.items():
        mean = values[[name == block for name in blocks]].mean()
        swatch = el("span", {"class": f"swatch tone-{tone}", "aria-hidden": "true"})
        entries.append(
            el(
                "li",
                {"title": block},
                swatch,
                short[block],
                " ",
                el("span", {"class": "faint"}, number(mean, 2)),
            )
        )
    return el(
        "div",
        None,
        el("p", {"class": "note"}, "Mean weight by block"),
        el("ul", {"class": "blocks"}, entries),
    )


def largest(panel: WeightsPanel, order: np.ndarray, heading: str) -> Html:
    """The largest weights as a table, beside the objective's course if there is one."""
    amount = len(panel.groups)
    return el(
        "div",
        {"class": "pair"},
        el(
            "div",
            None,
            el(heading, None, f"Largest {min(_TOP, amount)} of {amount}"),
            _table(panel, order[:_TOP]),
        ),
        _objective(panel, heading) if panel.objective is not None and len(panel.objective) else None,
    )


def _table(panel: WeightsPanel, order: np.ndarray) -> Html:
    values = np.asarray(panel.values)
    highest = values.max()
    rank = np.empty(len(values), dtype=int)
    rank[np.argsort(-values, kind="stable")] = np.arange(1, len(values) + 1)
    rows = [
        el(
            "tr",
            None,
            el("td", {"class": "number faint"}, int(rank[index])),
            el("th", {"scope": "row"}, el("code", None, breakable(panel.groups[index]))),
            el("td", {"class": "number"}, f"{values[index]:.3f}"),
            el(
                "td",
                {"class": "meter", "aria-hidden": "true"},
                el(
                    "span",
                    {"class": "bar"},
                    el("i", {"style": f"width:{100 * values[index] / highest:.4g}%"}),
                ),
            ),
        )
        for index in order
    ]
    heads = [
        el("th", {"scope": "col", "class": "number"}, "rank"),
        el("th", {"scope": "col"}, "group"),
        el("th", {"scope": "col", "class": "number"}, "weight"),
        el("td", {"aria-hidden": "true"}),
    ]
    return el("table", {"class": "data"}, el("thead", None, el("tr", None, heads)), el("tbody", None, rows))


def breakable(name: str) -> list[Html | str]:
    """A dotted name that may break after its dots, and not within its words."""
    first, *others = name.split(".")
    return [first, *(part for word in others for part in (".", el("wbr"), word))]


def _objective(panel: WeightsPanel, heading: str) -> Html:
    course = np.asarray(panel.objective)
    line = Line(panel.objective_label, np.arange(1, len(course) + 1), course)
    plot = line_plot(
        [line],
        title=f"{panel.objective_label} while learning, from {number(course[0])} to {number(course[-1])}",
        x_label=panel.objective_steps,
        y_label=panel.objective_label,
    )
    caption = f"{number(course[0], 4)} at the start, {number(course[-1], 4)} at the end."
    return el("figure", None, el(heading, None, "Course of learning"), plot, el("figcaption", None, caption))
