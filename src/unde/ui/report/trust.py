"""How far the scores can be trusted on the data at hand: copies of training examples that find their original."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from unde.console import counted
from unde.errors import UndeError
from unde.markup import Html, el, number
from unde.ui.report.svg import Line, line_key, line_plot
from unde.ui.report.tables import ResultTable, result_table

MEANING = (
    "Each of these training examples was changed a little, then more, and the method was asked which training example "
    "it came from. The curve is the share whose own original came first."
)
LIMITS = (
    "It tells whether the method recognises an example through a change, and is there to compare methods, settings and "
    "weights on this data. It does not tell whether scores predict retrained models, which LDS measures, and it cannot "
    "see an error that a copy shares with its original."
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
    """Curves for each kind of perturbation; `means` is one number for each way of scoring, the mean share in words.

    `verdicts` says for named weights what the guard thought of them.
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
    return el(
        "section",
        {"id": "trust", "class": "trust", "aria-labelledby": "trust-title"},
        el("h2", {"id": "trust-title"}, "Trust: do training examples find themselves?"),
        el("p", {"class": "lead"}, MEANING, " ", LIMITS),
        [
            el("p", {"class": "lead"}, el("strong", None, f"{name}: " if several else ""), verdict)
            for name, verdict in panel.verdicts.items()
        ],
        el("p", {"class": "note"}, panel.note) if panel.note else None,
        [_kind(curve, panel) for curve in panel.curves],
    )


def _kind(curve: TrustCurve, panel: TrustPanel) -> Html:
    several = len(curve.shares) > 1  # a curve alone has a stroke of its own
    keys = [
        el(
            "div",
            None,
            el("dt", None, line_key(i) if several else None, way),
            el("dd", None, panel.means[way]),
        )
        for i, way in enumerate(curve.shares)
    ]
    ends = "; ".join(
        f"{way} from {number(100 * shares[0][0])} % to {number(100 * shares[-1][0])} %"
        for way, shares in curve.shares.items()
    )
    return el(
        "div",
        {"class": "pair"},
        el(
            "figure",
            None,
            el("h3", None, f"Copies that find their original: {curve.kind}"),
            line_plot(
                _lines(curve),
                title=f"Share of copies that find their original, by strength of {curve.kind}: {ends}",
                x_label=f"strength of {curve.kind}, logarithmic",
                y_label="share found",
                y_range=(0.0, 1.0),
                x_ticks=[(math.log(s), f"{s:.2g}") for s in curve.strengths],
            ),
            el(
                "figcaption",
                None,
                el("dl", {"class": "areas"}, keys),
                "The number beside each name is the mean share over all strengths"
                f"{' and kinds' if len(panel.curves) > 1 else ''}; bands are 95 % intervals.",
            ),
        ),
        _table(curve),
    )


def _lines(curve: TrustCurve) -> list[Line]:
    x = [math.log(s) for s in curve.strengths]
    return [Line(way, x, *zip(*shares)) for way, shares in curve.shares.items()]


def _table(curve: TrustCurve) -> Html:
    rows = [
        [f"{strength:.2g}", *(_share(*shares[i]) for shares in curve.shares.values())]
        for i, strength in enumerate(curve.strengths)
    ]
    return result_table(
        ResultTable(
            f"In %, {counted(curve.examples, 'example')}",
            ["strength", *curve.shares],
            rows,
            note="With 95 % intervals (Wilson). Strengths are the same for all methods.",
        )
    )


def _share(share: float, low: float, high: float) -> str:
    return f"{100 * share:.0f} [{100 * low:.0f}, {100 * high:.0f}]"
