"""Several named sets of weights over the same groups, side by side."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from unde.console import counted
from unde.errors import UndeError
from unde.markup import Html, el
from unde.ui.report.svg import bar_plot, block_tones
from unde.ui.report.weights import (
    MEANING,
    WeightsPanel,
    arranged,
    bars,
    breakable,
    in_words,
    largest,
    order_of,
    short_names,
)

_SQUASHED = 4  # a shared scale may leave the flattest set no less than this part of the height


def check_sets(panels: Sequence[WeightsPanel]) -> None:
    """Refuse sets that cannot stand side by side."""
    names = [panel.name for panel in panels]
    if "" in names:
        raise UndeError(
            f"set {names.index('')} of {len(panels)} sets of weights has no name: pass WeightsPanel(..., name=)"
        )
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise UndeError(f"two sets of weights are called {twice!r}: give each a name of its own")
    for panel in panels[1:]:
        if list(panel.groups) != list(panels[0].groups):
            raise UndeError(
                f"the weights {panel.name!r} are of other groups than {panels[0].name!r}: expected the same "
                f"{len(panels[0].groups)} groups in the same order"
            )


def weight_sets_section(panels: Sequence[WeightsPanel]) -> Html:
    """The section with a plot for each set, the means of blocks, and every weight as a table."""
    order = order_of(panels[0])
    panels = [arranged(panel) for panel in panels]
    peaks = [max(1.0, float(np.max(panel.values))) for panel in panels]
    shared = max(peaks) if max(peaks) <= _SQUASHED * min(peaks) else None
    scale = "All plots have one scale." if shared else "Each plot has a scale of its own."
    return el(
        "section",
        {"id": "weights", "aria-labelledby": "weights-title"},
        el("h2", {"id": "weights-title"}, "Learned weights, set by set"),
        el(
            "p",
            {"class": "lead"},
            f"{MEANING} {len(panels)} sets over the same {counted(len(panels[0].groups), 'group')}, {order}. {scale}",
        ),
        _key(panels[0].blocks) if panels[0].blocks else None,
        el("div", {"class": "sets"}, [_set(panel, shared) for panel in panels]),
        _means(panels),
        _everything(panels),
    )


def _key(blocks: Sequence[str]) -> Html:
    short = short_names(blocks)
    return el(
        "ul",
        {"class": "blocks key-line", "aria-label": "colours of blocks"},
        [
            el("li", {"title": block}, _swatch(tone), short[block])
            for block, tone in block_tones(blocks).items()
        ],
    )


def _swatch(tone: int) -> Html:
    return el("span", {"class": f"swatch tone-{tone}", "aria-hidden": "true"})


def _set(panel: WeightsPanel, highest: float | None) -> Html:
    values = np.asarray(panel.values)
    order = np.argsort(-values, kind="stable")
    return el(
        "article",
        {"class": "weight-set"},
        el("h3", None, panel.name),
        el("p", {"class": "note"}, f"From {in_words(values)}"),
        el("p", {"class": "note"}, panel.note) if panel.note else None,
        el(
            "figure",
            {"class": "scroll", "tabindex": "0", "role": "region", "aria-label": f"plot of {panel.name}"},
            bar_plot(
                bars(panel, order),
                title=f"Bar plot of the weights {panel.name} of {counted(len(values), 'group')}",
                reference=1.0,
                reference_label="uniform",
                highest=highest,
                compact=True,
            ),
        ),
        el(
            "details",
            {"class": "fold"},
            el("summary", None, "Largest weights"),
            largest(panel, order, "h4"),
        ),
    )


def _means(panels: Sequence[WeightsPanel]) -> Html | None:
    blocks = panels[0].blocks
    if not blocks:
        return None
    short, names = short_names(blocks), np.array(blocks)
    rows = [
        el(
            "tr",
            None,
            el("th", {"scope": "row", "title": block}, _swatch(tone), short[block]),
            [
                el("td", {"class": "number"}, f"{np.asarray(p.values)[names == block].mean():.2f}")
                for p in panels
            ],
        )
        for block, tone in block_tones(blocks).items()
    ]
    return el(
        "div",
        {"class": "scroll", "tabindex": "0", "role": "region", "aria-label": "mean weight by block"},
        el(
            "table",
            {"class": "data results"},
            el("caption", None, "Mean weight by block"),
            el("thead", None, _heads("block", panels)),
            el("tbody", None, rows),
        ),
    )


def _everything(panels: Sequence[WeightsPanel]) -> Html:
    rows = [
        el(
            "tr",
            None,
            el("th", {"scope": "row"}, el("code", None, breakable(group))),
            [el("td", {"class": "number"}, f"{np.asarray(panel.values)[index]:.3f}") for panel in panels],
        )
        for index, group in enumerate(panels[0].groups)
    ]
    return el(
        "details",
        {"class": "fold"},
        el("summary", None, f"All {counted(len(rows), 'group')} under each set"),
        el(
            "div",
            {"class": "scroll"},
            el(
                "table",
                {"class": "data"},
                el("thead", None, _heads("group", panels)),
                el("tbody", None, rows),
            ),
        ),
    )


def _heads(first: str, panels: Sequence[WeightsPanel]) -> Html:
    return el(
        "tr",
        None,
        el("th", {"scope": "col"}, first),
        [el("th", {"scope": "col", "class": "number"}, panel.name) for panel in panels],
    )
