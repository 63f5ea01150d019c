"""Influence by source: a bar and a share for each author, domain, file or label."""

from __future__ import annotations

from dataclasses import dataclass

from unde.evaluate.sources import SourceShares, describe_sources
from unde.markup import Html, el
from unde.ui.report.tables import bar, lead, note, scroll, section, table

_ROWS = 40


@dataclass(frozen=True, eq=False)
class SourcesPanel:
    """Shares of influence by a column, over the queries of a page."""

    column: str
    shares: SourceShares
    queries: int


def sources_section(panel: SourcesPanel) -> Html:
    """The section with a bar for each source."""
    shares, lines = panel.shares, describe_sources(panel.shares)
    largest = max((e.mean for e in shares.shares), default=0.0) or 1.0
    heads = [
        el("th", head, scope="col")
        for head in (panel.column, "share of influence", "", "of examples", "total")
    ]
    rows = [
        el(
            "tr",
            el("th", name, scope="row"),
            el("td.meter", bar(estimate.mean / largest, "pro")),
            el("td", share),
            el("td", base),
            el("td", total),
        )
        for (name, share, base, total), estimate in list(zip(lines, shares.shares))[:_ROWS]
    ]
    more = f"{len(lines) - _ROWS:,} more sources are not shown. " if len(lines) > _ROWS else ""
    return section(
        "sources",
        f"Influence by {panel.column}",
        lead(
            f"The share of each {panel.column} in the positive scores of a query, and its summed scores: means over "
            f"{panel.queries:,} queries, ± half of the 95 % interval over queries. Beside it its share of the training "
            "examples, which is what chance would give."
        ),
        scroll(f"influence by {panel.column}", table(heads, rows, kind="data results")),
        note(more),
    )
