"""Heat maps: shares by row and column, several side by side under one colour scale."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from unde.data import to_numpy
from unde.errors import UndeError
from unde.markup import Html, el, number
from unde.ui.report.tables import note, scroll, section, table

HEATS = 10  # shades: .heat-0 … .heat-9 in the style
_TOPS = (0.01, 0.02, 0.05, *(t / 10 for t in range(1, 11)))  # round ends of the scale


@dataclass(frozen=True, eq=False)
class HeatmapPanel:
    """Values in [0, 1] by row and column, one map for each name; NaN where there is no such cell.

    `measure` names the values.

    >>> maps = {"style": [[0.5, 0.1], [0.2, float("nan")]], "subject": [[0.1, 0.3], [0.4, float("nan")]]}
    >>> panel = HeatmapPanel("Recall@10", ["down", "up"], ["q", "k"], maps, measure="recall@10")
    >>> panel.top
    0.5
    """

    title: str
    rows: Sequence[str]
    columns: Sequence[str]
    maps: Mapping[str, object]  # (rows, columns) each
    measure: str = ""
    note: str = ""

    def __post_init__(self) -> None:
        shape = (len(self.rows), len(self.columns))
        if not all(shape) or not self.maps:
            raise UndeError(
                f"the heat map {self.title!r} has {shape[0]} rows, {shape[1]} columns and {len(self.maps)} maps: "
                "expected at least one of each"
            )
        maps = {name: to_numpy(values).astype(np.float64) for name, values in self.maps.items()}
        for name, values in maps.items():
            if values.shape != shape:
                raise UndeError(
                    f"the map {name!r} of {self.title!r} has the shape {values.shape}: expected {shape}, a value for "
                    "each row and column (NaN where there is no such cell)"
                )
            bad = np.argwhere(~np.isnan(values) & ~((values >= 0) & (values <= 1)))
            if len(bad):
                r, c = bad[0]
                raise UndeError(
                    f"the map {name!r} of {self.title!r} has {values[r, c]:.6g} at {self.rows[r]!r}, "
                    f"{self.columns[c]!r}: expected shares from 0 to 1 (divide per cents by 100), or NaN for no cell"
                )
        object.__setattr__(self, "maps", maps)

    @property
    def top(self) -> float:
        """The end of the shared colour scale: the first round number that no value exceeds."""
        known = [v[~np.isnan(v)].max() for v in map(np.asarray, self.maps.values()) if not np.isnan(v).all()]
        return next(t for t in _TOPS if t >= max(known, default=1.0))


def heatmaps_section(panels: Sequence[HeatmapPanel]) -> Html:
    """The section with all heat maps."""
    return section("heatmaps", "Heat maps", [_panel(panel) for panel in panels])


def _panel(panel: HeatmapPanel) -> Html:
    return el(
        "div.heat-panel",
        el("h3", panel.title),
        note(panel.note),
        _scale(panel),
        el("div.maps", [_map(panel, name) for name in panel.maps]),
    )


def _scale(panel: HeatmapPanel) -> Html:
    shades = [el(f"i.heat-{level}") for level in range(HEATS)]
    return el(
        "p.note.heat-scale",
        f"{panel.measure or 'share'} in %: 0 ",
        el("span.shades", shades, aria_hidden="true"),
        f" {number(100 * panel.top)}",
    )


def _map(panel: HeatmapPanel, name: str) -> Html:
    values = np.asarray(panel.maps[name])
    if np.isnan(values).all():
        best = "no cell"
    else:
        r, c = map(int, np.unravel_index(np.nanargmax(values), values.shape))
        best = f"highest {number(100 * values[r, c])} % at {panel.rows[r]}, {panel.columns[c]}"
    heads = [el("td"), [el("th", column, scope="col") for column in panel.columns]]
    rows = [
        el(
            "tr",
            el("th", row, scope="row"),
            [_cell(v, f"{row}, {c}", panel.top) for v, c in zip(line, panel.columns)],
        )
        for row, line in zip(panel.rows, values)
    ]
    return scroll(
        f"heat map of {panel.measure or panel.title} for {name}: {best}",
        table(heads, rows, name, "heat"),
        el("figcaption", best[0].upper() + best[1:]),
        name="figure",
    )


def _cell(value: float, name: str, top: float) -> Html:
    if np.isnan(value):
        return el("td", "–", title=f"{name}: none")
    level, share = min(HEATS - 1, int(HEATS * value / top)), f"{100 * value:.{0 if top > 0.1 else 1}f}"
    tone = "cool" if level < HEATS // 2 else "hot"
    return el(f"td.heat-{level}.{tone}", share, title=f"{name}: {number(100 * value)} %")
