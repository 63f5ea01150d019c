"""How one example is shown: a picture, a passage of text, or its id alone."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from unde.data import to_numpy
from unde.errors import UndeError
from unde.markup import Child, Html, el, mark, score
from unde.ui.report.pixels import data_uri, to_pixels
from unde.ui.report.tables import bar
from unde.ui.report.tokens import cut_at, joined, shades

MAX_SIDE = 192  # pixels kept of a picture's longer side: twice what the page shows, for dense screens
_SMALL = 96  # pictures below this are enlarged with hard pixel edges
_FOLD_CHARACTERS, _FOLD_LINES = 320, 8  # a longer passage is folded behind its beginning
_FOLD_SLACK = 60  # a rest shorter than this is not worth a fold


@dataclass(frozen=True, eq=False)
class Item:
    """One example with what is known of it.

    `label` is the label that the example carries. Where the right one is known to be another, `true_label`
    says so; `mislabelled=True` says that the label is wrong without saying what is right. `image` is
    anything that `to_pixels` understands: (H, W), (H, W, C) or (C, H, W), array or tensor. `prompt` is the
    text that an image was made from, or learned with.

    >>> Item(17, label=3, true_label=8).is_mislabelled
    True
    >>> Item("doc-4", text="Once upon a time").kind
    'text'
    """

    id: int | str
    label: int | str | None = None
    image: np.ndarray | torch.Tensor | None = None
    text: str | None = None
    true_label: int | str | None = None
    mislabelled: bool = False
    prompt: str | None = None

    @property
    def name(self) -> str:
        """The id as it is shown: `#17` for positions, names as they are."""
        return self.id if isinstance(self.id, str) else f"#{self.id}"

    @property
    def is_mislabelled(self) -> bool:
        """Whether the label is known to be wrong."""
        return self.mislabelled or (self.true_label is not None and not same(self.label, self.true_label))

    @property
    def kind(self) -> str:
        """What can be shown: "text", "image" or "id"."""
        return "text" if self.text is not None else "image" if self.image is not None else "id"


@dataclass(frozen=True, eq=False)
class ScoredItem:
    """An example with its score. Positive = proponent.

    `tokens` are the pieces of its text with what each adds to the score, up to a share of `slack`; shown instead of the
    text. `marks` say what it is known to have contributed to the query.

    >>> ScoredItem(Item(17, label=3), 0.25).score
    0.25
    >>> ScoredItem(Item(4), 0.25, tokens=[("to", 0.5), (" be", -0.25)]).item.kind
    'id'
    """

    item: Item
    score: float
    tokens: Sequence[tuple[str, float]] | None = None
    marks: Sequence[Mark] = ()
    slack: float = 0.01  # features kept in half precision lose a little

    def __post_init__(self) -> None:
        object.__setattr__(self, "score", float(self.score))
        if not math.isfinite(self.score):
            raise UndeError(
                f"the score of example {self.item.id!r} is {self.score}: expected a finite number"
            )
        if self.tokens is not None:
            tokens = [(str(piece), float(value)) for piece, value in self.tokens]
            object.__setattr__(self, "tokens", tokens)
            total, size = math.fsum(v for _, v in tokens), math.fsum(abs(v) for _, v in tokens)
            if not abs(total - self.score) <= self.slack * max(size, abs(self.score)):
                raise UndeError(
                    f"the tokens of example {self.item.id!r} add up to {total:.6g}, its score is {self.score:.6g}: "
                    "expected contributions that sum to the score"
                )


def same(one: object, other: object) -> bool:
    """Whether two labels are equal, whatever their types (3, "3", a 0-d tensor)."""
    return str(_plain(one)) == str(_plain(other))


def _plain(label: object) -> object:
    return label.item() if isinstance(label, (torch.Tensor, np.generic)) else label


def label_text(label: object) -> str:
    """A label as text, without the wrapping of a tensor or a NumPy scalar.

    >>> label_text(torch.tensor(3)), label_text(np.str_("cat"))
    ('3', 'cat')
    """
    return str(_plain(label))


def kind_of(items: Iterable[Item]) -> str:
    """The layout of a list of examples: text if any has text, else image if any has one, else id."""
    kinds = {item.kind for item in items}
    return next((kind for kind in ("text", "image") if kind in kinds), "id")


def picture(item: Item, role: str, max_side: int = MAX_SIDE) -> Html:
    """The picture of an example, or a frame with its id where there is none. `role` begins the alt text."""
    if item.image is None:
        return el("span.picture.missing", item.name)
    try:
        pixels = to_pixels(item.image, max_side)
    except UndeError as error:
        raise UndeError(f"example {item.id!r}: {error}") from error
    height, width = pixels.shape[:2]
    alt = f"{role} {item.name}" + (f", label {label_text(item.label)}" if item.label is not None else "")
    alt += f", prompt “{item.prompt}”" if item.prompt is not None else ""
    crisp = ".crisp" if max(height, width) < _SMALL else ""
    return el(f"img.picture{crisp}", src=data_uri(pixels), width=width, height=height, alt=alt, title=alt)


def passage(text: str) -> Html:
    """A passage of text; a long one shows its beginning and opens on demand."""
    head, rest = fold(text)
    return folded(head, rest, f"… {len(rest):,} more characters" if rest else "")


def folded(head: Child, rest: Child, more: str, kind: str = "passage") -> Html:
    """A passage whose rest, if `more` announces one, opens on demand."""
    if not more:
        return el(f"p.{kind}", head, dir="auto")
    return el(
        f"details.{kind}",
        el("summary", el("span.head", head), el("wbr"), el("span.more", more)),
        el("div.rest", rest),
        dir="auto",
    )


def shaded_passage(tokens: Sequence[tuple[str, float]]) -> Html:
    """A passage whose tokens are shaded by what they add to the score; a long one is folded."""
    spans = shades(tokens)
    head, rest = fold("".join(span.text for span in spans))
    at = cut_at(spans, len(head))
    visible, hidden = spans[:at], spans[at:]
    more = ""
    if rest:
        more = f"… {sum(len(span.text) for span in hidden):,} more characters"
        if max(span.level for span in hidden) > max((span.level for span in visible), default=0):
            more += ", the strongest token among them"
    return folded(joined(visible), joined(hidden), more, "passage shaded")


def fold(text: str) -> tuple[str, str]:
    """Split a passage into its visible beginning and the folded rest, between words where possible.

    >>> fold("short")
    ('short', '')
    >>> head, rest = fold("word " * 200)
    >>> len(head) <= 320, head + rest == "word " * 200
    (True, True)
    """
    cut = min(len(text), _FOLD_CHARACTERS)
    lines = text.split("\n", _FOLD_LINES)
    if len(lines) > _FOLD_LINES:
        cut = min(cut, len(text) - len(lines[-1]))
    if len(text) - cut < _FOLD_SLACK:
        return text, ""
    if not (text[cut - 1].isspace() or text[cut].isspace()):
        space = max(text.rfind(" ", 0, cut), text.rfind("\n", 0, cut))
        if space > cut // 2:
            cut = space + 1
    return text[:cut], text[cut:]


def label_of(item: Item) -> Html | None:
    """The label of an example; `given → true` where the given one is known to be wrong."""
    if item.label is None:
        return None
    given = label_text(item.label)
    if item.true_label is None or not item.is_mislabelled:
        return el("span.label", given, title=f"label {given}")
    true = label_text(item.true_label)
    return el(
        "span.label",
        el("s", given),
        el("span.sr", " is really "),
        el("span", " → ", aria_hidden="true"),
        el("b", true),
        title=f"carries the label {given}, is really {true}",
    )


DIFFERS = mark("differs", "≠", "other label", "its label is not the one asked about")
MISLABELLED = mark("mislabelled", "!", "mislabelled", "its label is known to be wrong")


def score_of(scored: ScoredItem, largest: float) -> Html:
    """A score as a number and as a bar relative to `largest`, the largest magnitude of its row."""
    share = abs(scored.score) / largest if largest > 0 else 0.0
    tone = "pro" if scored.score >= 0 else "opp"
    number = el("span.score", score(scored.score))
    return el("span.value", number, bar(share, tone))


def largest_score(*lists: Sequence[ScoredItem]) -> float:
    """The largest magnitude in some lists of scores; 0 for none.

    >>> largest_score([ScoredItem(Item(0), 1.0)], [ScoredItem(Item(1), -2.0)])
    2.0
    """
    return max((abs(scored.score) for scores in lists for scored in scores), default=0.0)


def example(
    scored: ScoredItem,
    kind: str,
    largest: float,
    marks: Sequence[Html] = (),
    state: str = "",
    facts: Html | None = None,
) -> Html:
    """One example of a list, in the layout `kind`; `state` is an extra class for its frame, `facts` stand in place of
    its label and score."""
    item = scored.item
    signs = el("span.marks", marks) if marks else None
    prompt = None if item.prompt is None else el("span.caption", item.prompt, title=item.prompt, dir="auto")
    label, value = (None, None) if facts else ([label_of(item), prompt], score_of(scored, largest))
    if kind == "image":
        name = el("span.id", item.name) if facts else None
        return el(
            f"li.example.thumb.{state}",
            el("span.frame", picture(item, "training example"), signs),
            el("div.about" if facts else "span.about", name, label, value, facts),
        )
    name = el("span.id", item.name)
    line = el("span.about", name, el("span.what", label, signs), value)
    if kind == "id":
        return el(f"li.example.plain.{state}", line, facts)
    if scored.tokens is not None:
        words: Html | None = shaded_passage(scored.tokens)
    else:
        words = passage(item.text) if item.text is not None else None
    body = [picture(item, "training example") if item.image is not None else None, words]
    return el(f"li.example.reading.{state}", line, body, facts)


_PAPERS = {"subject": "P"}  # the paper's letter: S is for style


@dataclass(frozen=True)
class Mark:
    """A letter on a training example, and what the example is known to have contributed to the query.

    >>> Mark("P", "subject").letter
    'P'
    """

    letter: str
    contribution: str

    def __post_init__(self) -> None:
        if not 1 <= len(self.letter) <= 2:
            raise UndeError(
                f"the mark {self.letter!r} of {self.contribution!r}: expected one letter, or two at most"
            )

    def html(self) -> Html:
        return mark(
            "known", self.letter, self.contribution, f"known contributor to the query’s {self.contribution}"
        )


def marks_for(names: Iterable[str]) -> dict[str, Mark]:
    """A mark for each kind of contributor: the first letter of its name that is still free.

    >>> [m.letter for m in marks_for(["subject", "style", "background", "brush"]).values()]
    ['P', 'S', 'B', 'R']
    """
    marks: dict[str, Mark] = {}
    for name in names:
        taken = {m.letter for m in marks.values()}
        letters = [_PAPERS.get(name, ""), *(c for c in name.upper() if c.isalnum()), *map(str, range(1, 10))]
        marks[name] = Mark(next((c for c in letters if c and c not in taken), "?"), name)
    return marks


def legend_of(marks: Iterable[Mark]) -> list[Mark]:
    """Each mark once, by name; a letter that stands for two things is an error."""
    known: dict[str, Mark] = {}
    for each in marks:
        other = known.setdefault(each.letter, each)
        if other != each:
            raise UndeError(
                f"the mark {each.letter!r} stands for {other.contribution!r} and for {each.contribution!r} on one "
                "page: give each its own letter"
            )
    return sorted(known.values(), key=lambda each: each.contribution)


def contributor_flags(
    contributors: Mapping[str, object], shape: tuple[int, ...], of: str
) -> dict[str, np.ndarray]:
    """The flags of each kind of contributor as bool arrays of one shape; `of` describes the shape in errors."""
    out = {}
    for name, flags in contributors.items():
        array = to_numpy(flags)
        if array.shape != shape or not np.isin(array, (0, 1)).all():
            raise UndeError(
                f"the contributors {name!r} are {array.dtype} of shape {array.shape}: expected true or false for {of}, "
                f"{shape}"
            )
        out[name] = array.astype(bool)
    return out
