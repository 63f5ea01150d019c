"""The panel of trust: curves follow the shares, ways of scoring are told apart, verdicts and limits are said."""

import pytest
import torch

from report_dom import Node, parse, words
from unde import Weights
from unde.index.retrieval_curve import Curve, Trust, wilson
from unde.ui.report import Page, TrustPanel
from unde.ui.report.trust import LIMITS, trust_section, verdict

STRENGTHS = [0.05, 0.125, 0.3125, 0.78125, 1.953125]  # each 2.5 times the one before
BEFORE, AFTER = [1.0, 0.75, 0.5, 0.25, 0.0], [1.0, 0.8, 0.6, 0.3, 0.1]


def trust(after: list[float] | None, held_out: bool = True, kind: str = "noise") -> Trust:
    gain = None if after is None else sum(after) / 5 - 0.5
    one = Curve(kind, STRENGTHS, BEFORE, after, 20)
    mean = None if after is None else sum(after) / 5
    return Trust("TRAK", [one], 0.5, mean, gain, None if gain is None else 0.03, 20, held_out, 0)


def weights(**provenance) -> Weights:
    return Weights(torch.tensor([0.5, 1.5]), ["a", "b"], [], provenance)


def points(node: Node) -> list[tuple[float, float]]:
    pairs = (pair.split(",") for pair in (node.attributes["points"] or "").split())
    return [(float(x), float(y)) for x, y in pairs]


def test_curves_bands_and_table_follow_the_shares():
    root = parse(trust_section(TrustPanel({"weighted": trust(AFTER)}, {"weighted": weights()})))
    before, after = (points(node) for node in root.all("polyline"))
    steps = [b[0] - a[0] for a, b in zip(before, before[1:])]
    assert steps == pytest.approx([steps[0]] * 4, abs=0.03)  # strengths are even in the logarithm
    height = before[4][1] - before[0][1]
    assert height > 100
    for drawn, shares in ((before, BEFORE), (after, AFTER)):
        assert [y for _, y in drawn] == pytest.approx([before[4][1] - height * s for s in shares], abs=0.02)
    band = points(root.all("polygon")[0])
    expected = [wilson(s, 20)[0] for s in BEFORE] + [wilson(s, 20)[1] for s in reversed(BEFORE)]
    assert [y for _, y in band] == pytest.approx([before[4][1] - height * s for s in expected], abs=0.02)
    rows = [[words(cell) for cell in row.all("td") + row.all("th")] for row in root.all("tbody tr")]
    assert len(rows) == 5
    assert set(rows[1]) == {"0.12", "75 [53, 89]", "80 [58, 92]"}
    assert [words(node) for node in root.all("dd")] == ["50 %", "56 % (+6.0 ± 3.0)"]
    assert words(root.one("caption")) == "In %, 20 examples"
    assert LIMITS in words(root.one("#trust"))


def test_a_curve_alone_needs_no_key():
    alone = parse(trust_section(TrustPanel({"unweighted": trust(None)})))
    both = parse(trust_section(TrustPanel({"weighted": trust(AFTER)}, {"weighted": weights()})))
    assert len(alone.all("svg.key")) == 0 and len(both.all("svg.key")) == 2


def test_names_stay_text_and_the_page_lists_the_section():
    word = "<b>&'\""
    sets = {word: weights(confirmed=True), "other": weights(confirmed=True)}
    found = {name: trust(AFTER, kind=word) for name in sets}
    page = Page("t", trust=TrustPanel(found, sets, word)).html()
    assert "<b>" not in page
    root = parse(page)
    assert "#trust" in [link.attributes["href"] for link in root.all("nav a")]
    assert (
        words(root.all("#trust p.lead")[1]) == f"{word}: The guard of self-retrieval confirmed these weights."
    )
    assert "http" not in page.replace("http-equiv", "")


def test_uniform_weights_are_the_unweighted_method():
    found = {"one": trust(AFTER), "same": trust(BEFORE)}
    panel = TrustPanel(found, {"one": weights(), "same": Weights.uniform(["a", "b"])}, unweighted="plain")
    assert panel.shares(0) == {"plain": BEFORE, "one": AFTER}
    assert panel.means == {"plain": "50 %", "one": "56 % (+6.0 ± 3.0)"}
    few = TrustPanel({"unweighted": trust(None, held_out=False)})
    assert list(few.shares(0)) == ["unweighted"]
    assert "too few training examples" in trust_section(few)
    assert "too few training examples" not in trust_section(panel)


def test_verdicts_of_the_guard():
    found = {"noise": {"unweighted": 0.25, "weighted": 0.4, "copies": 100}}
    good = weights(found=found, refused=None, strength={"noise": 0.3})
    assert verdict(good) == "Held-out copies that find their original: noise (strength 0.3) 25 % → 40 %."
    bad = weights(found=found, refused="weak copies (noise) became harder to find (t = -7.1)", strength={})
    assert verdict(bad).startswith("Weights stay uniform") and verdict(bad).endswith("(t = −7.1).")
    assert "confirmed none" in verdict(weights(confirmed=False))
    assert verdict(weights(k=3)) == ""
    uniform = Weights(torch.ones(1), ["a"], [], bad.provenance)
    panel = TrustPanel({"w": trust(BEFORE)}, {"w": uniform})
    assert list(panel.shares(0)) == ["unweighted"] and verdict(bad) in words(parse(trust_section(panel)))
