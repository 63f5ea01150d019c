"""Tokens shaded by what they add to a score: every value kept, both signs told apart with and without colour."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from schemes import DARK, LIGHT
from test_report_page import contrast

from refusals import refused
from report_dom import parse, words
from unde import UndeError
from unde.ui.report import Item, QueryPanel, Row, ScoredItem
from unde.ui.report.items import example, shaded_passage
from unde.ui.report.page import CSS
from unde.ui.report.queries import queries_section
from unde.ui.report.tokens import LEVELS, joined, shades

VALUES = st.floats(-1, 1, allow_nan=False)
TOKENS = st.lists(st.tuples(st.sampled_from(["", "a", " b", "\n", "<b>", " 🎈"]), VALUES), min_size=1)


@given(TOKENS)
def test_no_text_and_no_value_is_lost(tokens):
    spans = shades(tokens)
    text = "".join(piece for piece, _ in tokens)
    assert "".join(span.text for span in spans) == text
    assert parse("".join(joined(spans))).text == text
    if text:
        assert sum(span.value for span in spans) == pytest.approx(sum(v for _, v in tokens), abs=1e-9)
        assert sum(span.tokens for span in spans) == len(tokens)


def test_shades_are_relative_to_the_strongest():
    spans = shades([("a", 2.0), ("b", -2.0), ("c", 1.0), ("d", -0.21), ("e", 0.19), ("f", 0.0)])
    assert [span.level for span in spans] == [LEVELS, LEVELS, 2, 1, 0, 0]
    assert [span.level for span in shades([("a", 0.0), ("b", 0.0)])] == [0, 0]


def test_spans_say_their_value():
    root = parse("".join(joined(shades([(" to", 0.5), (" be", -0.25), (" or", 0.01), (" not", -0.03)]))))
    plus, minus, weak = root.all("span")
    assert (plus.text, plus.classes, plus.attributes["title"]) == ("to", {"t", "plus", "l5"}, "+0.500")
    assert (minus.text, minus.classes, minus.attributes["title"]) == ("be", {"t", "minus", "l2"}, "−0.250")
    assert (weak.text, weak.classes) == ("or not", set())
    assert weak.attributes["title"] == "−0.0200 (2 tokens together)"


def test_a_long_passage_is_folded_between_tokens():
    tokens = [(f" word{i}", 0.001) for i in range(300)]
    tokens[250] = (" strong", 1.0)
    root = parse(shaded_passage(tokens)).one("details.passage.shaded")
    head, rest = root.one(".head").text, root.one(".rest").text
    assert head + rest == "".join(piece for piece, _ in tokens)
    assert 200 < len(head) <= 320
    assert rest.startswith(" word")
    assert root.one(".more").text == f"… {len(rest):,} more characters, the strongest token among them"
    assert [node.text for node in root.all(".l5")] == ["strong"]
    short = parse(shaded_passage(tokens[:5]))
    assert not short.all("details") and short.one("p.shaded").text == "".join(p for p, _ in tokens[:5])


def test_contributions_must_sum_to_the_score():
    with pytest.raises(UndeError, match=r"tokens of example 7 add up to 0\.5, its score is 0\.9"):
        ScoredItem(Item(7), 0.9, tokens=[("a", 0.25), ("b", 0.25)])
    refused("tokens of example 7 add up to nan", ScoredItem, Item(7), 0.9, tokens=[("a", float("nan"))])
    ScoredItem(Item(7), 1.001, tokens=[("a", 100.0), ("b", -99.0)])  # what cancels cannot be exact


def test_tokens_are_shown_instead_of_the_text_and_explained():
    plain = ScoredItem(Item("d:1", text="to be"), 0.25)
    shaded = ScoredItem(Item("d:1", text="to be"), 0.25, tokens=[("to", 0.5), (" be", -0.25)])
    assert parse(example(plain, "text", 1.0)).one(".passage").text == "to be"
    root = parse(queries_section([QueryPanel(Item("q"), [Row("trak", [shaded])])]))
    assert "kind-text" in root.one("article").classes
    assert [node.text for node in root.all("li.example .t")] == ["to", "be"]
    assert "learning a token raises the query’s loss" in words(root.one("ul.legend"))
    assert len(root.all("ul.legend .t")) == 2 * LEVELS
    assert not parse(queries_section([QueryPanel(Item("q"), [Row("trak", [plain])])])).all("ul.legend")


def test_two_ways_stand_beside_each_other():
    row = Row("trak", [ScoredItem(Item("d:1", text="to be"), 0.25)])
    one = parse(queries_section([QueryPanel(Item("q"), [row])])).one(".rows")
    two = parse(queries_section([QueryPanel(Item("q"), [row, row])])).one(".rows")
    assert "beside" not in one.classes and "beside" in two.classes


def test_the_two_sides_differ_without_colour():
    assert re.search(r"\.t\.minus \{[^}]*text-decoration-style: dotted", CSS)
    assert re.search(r"\.l4, \.l5 \{[^}]*text-decoration-line: underline", CSS)


@pytest.mark.parametrize("scheme", [LIGHT, DARK])
def test_text_is_legible_on_every_shade(scheme):
    colours = dict(re.findall(r"--([\w-]+): (#\w{6})", scheme))
    shares = [int(share) / 100 for share in re.findall(r"--shade: (\d+)%", CSS)]
    assert len(shares) == LEVELS and shares == sorted(shares)
    for tone in ("pro", "opp"):
        for ground in ("page", "panel"):
            for share in shares:
                parts = zip(bytes.fromhex(colours[tone][1:]), bytes.fromhex(colours[ground][1:]))
                mixed = "#" + bytes(round(share * a + (1 - share) * b) for a, b in parts).hex()
                assert contrast(colours["ink"], mixed) >= 4.5, (tone, ground, share)


def test_how_much_tokens_may_miss_their_score():
    tokens = [("a", 0.5), ("b", 0.53)]
    refused(r"add up to 1\.03", ScoredItem, Item(7), 1.0, tokens=tokens)
    assert ScoredItem(Item(7), 1.0, tokens=tokens, slack=0.05).tokens == tokens
