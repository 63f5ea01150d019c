"""Trust in the scores on the data at hand: the share of perturbed copies that find their original."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from unde.console import counted
from unde.errors import UndeError
from unde.markup import Html, el, number
from unde.ui.report.svg import Line, curve_key, line_plot
from unde.ui.report.tables import ResultTable, lead, note, result_table, section

MEANING = (
    "Each of these training examples was changed a little, then more, and the method ranked all training examples for "
    "it. The curve is the share of changed examples whose original came first."
)
LIMITS = (
    "It measures whether the method recognises a changed example, and compares methods, settings and weights on this "
    "data. It does not measure whether scores predict retrained models (LDS does), and it misses errors that a copy "
    "shares with its original."
)


@dataclass(frozen=True)
class TrustCurve:
    """One kind of perturbation: for each way of scoring, the share found at each strength with its interval.

    >>> TrustCurve("noise", 20, [0.1, 1.0], {"unweighted": [(0.8, 0.6, 0.9), (0.1, 0.0, 0.3)]}).kind
    'noise'
    """

    kind: str
    examples: int
    strengths: Sequence[float]
    shares: Mapping[str, Sequence[tuple[float, float, float]]]  # share, and the ends of its interval

    def __post_init__(self) -> None:
        if not self.strengths or not all(math.isfinite(s) and s > 0 for s in self.strengths):
            raise UndeError(
                f"strengths of {self.kind!r} are {list(self.strengths)}: expected positive numbers, one at least"
            )
        if not self.shares:
            raise UndeError(f"no shares of {self.kind!r}: expected those of one way of scoring at least")
        for way, shares in self.shares.items():
            if len(shares) != len(self.strengths):
                raise UndeError(
                    f"{len(shares)} shares of {way!r} for {len(self.strengths)} strengths of {self.kind!r}: expected "
                    "one each"
                )
            if not all(0 <= low <= share <= high <= 1 for share, low, high in shares):
                raise UndeError(f"the shares of {way!r}: expected numbers from 0 to 1 inside their intervals")


@dataclass(frozen=True)
class TrustPanel:
    """Curves for each kind of perturbation; `means` is the mean share of each way of scoring, as text.

    `verdicts` are the verdicts of the guard on named weights.
    """

    curves: Sequence[TrustCurve]
    means: Mapping[str, str]
    verdicts: Mapping[str, str] = field(default_factory=dict)
    note: str = ""

    def __post_init__(self) -> None:
        ways = {way for curve in self.curves for way in curve.shares}
        if not ways or not ways <= set(self.means):
            raise UndeError(
                f"curves of {sorted(ways)} and mean shares of {sorted(self.means)}: expected a mean for every way of "
                "scoring, and one curve at least"
            )


def trust_section(panel: TrustPanel) -> Html:
    """The section with a plot and a table for each kind of perturbation."""
    several = len(panel.verdicts) > 1
    return section(
        "trust",
        "Trust: do training examples find themselves?",
        lead(MEANING, " ", LIMITS),
        [
            lead(el("strong", None, f"{name}: " if several else ""), verdict)
            for name, verdict in panel.verdicts.items()
        ],
        note(panel.note),
        [_kind(curve, panel) for curve in panel.curves],
        kind="trust",
    )


def _kind(curve: TrustCurve, panel: TrustPanel) -> Html:
    ends = "; ".join(
        f"{way} from {number(100 * shares[0][0])} % to {number(100 * shares[-1][0])} %"
        for way, shares in curve.shares.items()
    )
    x = [math.log(s) for s in curve.strengths]
    plot = line_plot(
        [Line(way, x, *zip(*shares)) for way, shares in curve.shares.items()],
        title=f"Share of copies that find their original, by strength of {curve.kind}: {ends}",
        x_label=f"strength of {curve.kind}, logarithmic",
        y_label="share found",
        y_range=(0.0, 1.0),
        x_ticks=[(math.log(s), f"{s:.2g}") for s in curve.strengths],
    )
    caption = el(
        "figcaption",
        None,
        curve_key([(way, panel.means[way]) for way in curve.shares]),
        "The number beside each name is the mean share over all strengths"
        f"{' and kinds' if len(panel.curves) > 1 else ''}; bands are 95 % intervals.",
    )
    heading = el("h3", None, f"Copies that find their original: {curve.kind}")
    return el("div", {"class": "pair"}, el("figure", None, heading, plot, caption), _table(curve))


def _table(curve: TrustCurve) -> Html:
    rows = [
        [f"{strength:.2g}", *(_share(*shares[i]) for shares in curve.shares.values())]
        for i, strength in enumerate(curve.strengths)
    ]
    title = f"In %, {counted(curve.examples, 'example')}"
    remark = "With 95 % intervals (Wilson). Strengths are the same for all methods."
    return result_table(ResultTable(title, ["strength", *curve.shares], rows, note=remark))


def _share(share: float, low: float, high: float) -> str:
    return f"{100 * share:.0f} [{100 * low:.0f}, {100 * high:.0f}]"
