"""Tokens of a passage, shaded by what each adds to its score."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby

from unde.console import counted
from unde.markup import Html, el, join, score

LEVELS = 5  # shades on each side; a token below a tenth of the strongest has none


@dataclass(frozen=True)
class TokenSpan:
    """One token with text, or a run of tokens."""

    text: str
    value: float
    tokens: int
    level: int = 0

    def html(self) -> Html:
        side = "plus" if self.value > 0 else "minus"
        together = f" ({counted(self.tokens, 'token')} together)" if self.tokens > 1 else ""
        # The space before a word belongs to its token, but not to its shade.
        word = self.text.lstrip() or self.text
        tag = f"span.t.{side}.l{self.level}" if self.level else "span"
        return join([self.text[: -len(word)], el(tag, word, title=score(self.value) + together)])


def shades(tokens: Sequence[tuple[str, float]]) -> list[TokenSpan]:
    """A span for each token; a token without text goes with the one that follows, so that no value is lost.

    >>> [(s.text, s.value, s.level) for s in shades([("a", 1.0), ("", 0.25), ("b", -0.75), ("c", 0.01)])]
    [('a', 1.0, 5), ('b', -0.5, 2), ('c', 0.01, 0)]
    """
    whole: list[TokenSpan] = []
    value, number = 0.0, 0
    for text, part in tokens:
        value, number = value + part, number + 1
        if text:
            whole.append(TokenSpan(text, value, number))
            value, number = 0.0, 0
    if number and whole:
        last = whole.pop()
        whole.append(TokenSpan(last.text, last.value + value, last.tokens + number))
    largest = max((abs(span.value) for span in whole), default=0.0) or 1.0
    return [replace(span, level=round(LEVELS * abs(span.value) / largest)) for span in whole]


def joined(spans: Sequence[TokenSpan]) -> list[Html]:
    """Spans as markup. Neighbours too weak for a shade share one element, which keeps pages small.

    >>> joined([TokenSpan("to", 0.1, 1), TokenSpan(" be", -0.2, 1)])
    ['<span title="−0.100 (2 tokens together)">to be</span>']
    """
    out: list[Html] = []
    for strong, run in groupby(spans, key=lambda span: span.level > 0):
        some = list(run)
        if not strong:
            text, value = "".join(span.text for span in some), sum(span.value for span in some)
            some = [TokenSpan(text, value, sum(span.tokens for span in some))]
        out += [span.html() for span in some]
    return out


def cut_at(spans: Sequence[TokenSpan], characters: int) -> int:
    """How many spans fit into so many characters.

    >>> cut_at([TokenSpan("to", 0, 1), TokenSpan(" be", 0, 1), TokenSpan(" or", 0, 1)], 6)
    2
    """
    ends = accumulate(len(span.text) for span in spans)
    return sum(end <= characters for end in ends)


def key() -> Html:
    """The legend: the two sides of the scale, from strong to strong."""

    def side(name: str, levels: Sequence[int]) -> list[Html]:
        return [el(f"span.t.{name}.l{level}", "\u2007\u2007") for level in levels]

    return join(
        [
            "learning a token raises the query’s loss ",
            el("span.scale", side("minus", range(LEVELS, 0, -1)), aria_hidden="true"),
            el("span.scale", side("plus", range(1, LEVELS + 1)), aria_hidden="true"),
            " lowers it (strong ones underlined, dotted and solid). The shade is relative to the strongest token of "
            "the passage; point at a token for what it adds to the score.",
        ]
    )
