"""One self-contained HTML page: what was asked, which training examples answered, and how it was found."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from unde.errors import UndeError
from unde.index.calibration import Calibration
from unde.markup import Html, el
from unde.methods import DAS, JourneyTRAK, Method, TracIn
from unde.store.files import write_atomically
from unde.tasks import Classification, Diffusion
from unde.tasks.base import Task
from unde.ui.report.mislabel import MislabelPanel, mislabel_section
from unde.ui.report.queries import QueryPanel, baseline_names, queries_section
from unde.ui.report.summary import SummaryPanel, calibration_section, summary_section
from unde.ui.report.tables import (
    Card,
    HeatmapPanel,
    ResultTable,
    SourcesPanel,
    Step,
    cards_list,
    evaluation_section,
    heatmaps_section,
    provenance_section,
    sources_section,
    steps_section,
)
from unde.ui.report.weights import WeightsPanel, check_sets, weights_section

# The browser itself is told to fetch nothing and to run nothing.
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"


@dataclass(frozen=True)
class Meaning:
    """What positive and negative scores say; without `hurts` scores have no sign, and `helps` is of high ones.

    A score is ⟨g(q), K g(n)⟩ of gradients of one measurement: positive where a step that changes the measurement of the
    training example changes that of the query the same way. A loss is what training lowers, so there a proponent lowers
    the query's loss; other measurements are not what training goes down, and say less.
    """

    helps: str
    hurts: str | None
    note: str = ""
    images: bool = False  # whether queries are images that the model made

    @property
    def in_words(self) -> str:
        """
        >>> Meaning("it helps", "it hurts").in_words
        'Proponents (positive scores): it helps. Opponents (negative scores): it hurts.'
        """
        note = f" {self.note}" if self.note else ""
        if self.hurts is None:
            return f"High scores: {self.helps}.{note}"
        return f"Proponents (positive scores): {self.helps}. Opponents (negative scores): {self.hurts}.{note}"


# Where nobody says which method it was. Those for diffusion models need not differentiate the loss.
_OF_LOSSES = Meaning("training on it lowers the model’s loss on the query", "training on it raises that loss")
_OF_IMAGES = Meaning(
    "by this method, training on it helped to make the image", "training on it worked against the image"
)


@dataclass(frozen=True, eq=False)
class Page:
    """A report. Every part but the title may be left out; `write` makes one HTML file of it.

    Several sets of weights over the same groups are a list, in which each has a name. `meaning` is what scores say, by
    default what those of a loss do.

    >>> from unde.ui.report import Item, Row, ScoredItem
    >>> row = Row("unweighted", [ScoredItem(Item(12, label="cat"), 0.8)], [ScoredItem(Item(7, label="dog"), -0.3)])
    >>> page = Page("Two cats", queries=[QueryPanel(Item("q0", label="cat"), [row], predicted="cat")])
    >>> page.html()[:15]
    '<!doctype html>'
    """

    title: str
    subtitle: str = ""
    cards: Sequence[Card] = ()
    summary: SummaryPanel | None = None
    queries: Sequence[QueryPanel] = ()
    weights: WeightsPanel | Sequence[WeightsPanel] | None = None
    calibration: Calibration | None = None
    heatmaps: Sequence[HeatmapPanel] = ()
    mislabelled: MislabelPanel | None = None
    sources: SourcesPanel | None = None
    tables: Sequence[ResultTable] = ()
    steps: Sequence[Step] = ()
    provenance: Mapping[str, object] = field(default_factory=dict)
    meaning: Meaning | None = None
    note: str = ""
    warnings: Sequence[str] = ()  # what to know before the answers are read

    def __post_init__(self) -> None:
        if len(self._weights) > 1:
            check_sets(self._weights)

    @property
    def _weights(self) -> list[WeightsPanel]:
        if self.weights is None:
            return []
        return [self.weights] if isinstance(self.weights, WeightsPanel) else list(self.weights)

    def html(self) -> str:
        """The whole page as text."""
        sections = list(self._sections())
        nav = el(
            "nav.contents",
            el(
                "ul",
                el("li.brand", el("a", "unde", href="#top")),
                [el("li", el("a", name, href=f"#{anchor}")) for anchor, name, _ in sections],
            ),
            aria_label="sections of this page",
        )
        body = el(
            "body",
            el("a.skip", "Skip to the content", href="#main"),
            nav,
            el(
                "header.masthead",
                el("h1", self.title),
                el("p.subtitle", self.subtitle) if self.subtitle else None,
                cards_list(self.cards),
            ),
            el(
                "main",
                None if self.summary is None else summary_section(self.summary),
                el(
                    "aside.warnings",
                    el("h2", "Read this first", id="warnings-title"),
                    el("ul", [el("li", sentence) for sentence in self.warnings]),
                    aria_labelledby="warnings-title",
                )
                if len(self.warnings)
                else None,
                _how_to_read(self) if len(self.queries) else None,
                [section for _, _, section in sections],
                id="main",
            ),
            id="top",
        )
        body = dedupe_images(body)
        return f'<!doctype html>\n<html lang="en">\n{_head(self.title)}\n{body}\n</html>\n'

    def write(self, path: str | os.PathLike[str]) -> Path:
        """Write the page to `path` and return it. The old file stays if writing fails."""
        target = Path(path).expanduser()
        if target.is_dir():
            raise UndeError(f"cannot write the report to {str(target)!r}: it is a folder; give a file in it")
        content = self.html().encode("utf-8")
        # Through a link, the file behind it is replaced, not the link.
        target = Path(os.path.realpath(target))
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(target, content)
        except OSError as error:
            raise UndeError(f"cannot write the report to {str(path)!r}: {error}") from error
        return Path(path).expanduser()

    def _sections(self) -> Iterator[tuple[str, str, Html]]:
        """The anchor, the name and the content of each part that is there."""
        parts: list[tuple[str, str, Callable[[Any], Html], Any]] = [
            ("queries", "Queries", queries_section, self.queries),
            ("calibration", "Calibration", calibration_section, self.calibration),
            ("weights", "Weights", weights_section, self._weights),
            ("heatmaps", "Heat maps", heatmaps_section, self.heatmaps),
            ("mislabelled", "Labels", mislabel_section, self.mislabelled),
            ("sources", "Sources", sources_section, self.sources),
            ("evaluation", "Evaluation", evaluation_section, self.tables),
            ("steps", "Steps", steps_section, self.steps),
            ("provenance", "Provenance", provenance_section, self.provenance),
        ]
        for anchor, name, make, content in parts:
            if content is not None and (not hasattr(content, "__len__") or len(content)):
                yield anchor, name, make(content)


def _head(title: str) -> Html:
    return el(
        "head",
        el("meta", charset="utf-8"),
        el("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        el("meta", name="viewport", content="width=device-width, initial-scale=1"),
        el("meta", name="color-scheme", content="light dark"),
        el("meta", name="generator", content="unde"),
        el("title", title),
        # An empty icon keeps a browser from asking a server for one.
        el("link", rel="icon", href="data:,"),
        el("style", Html(CSS)),
    )


def _how_to_read(page: Page) -> Html:
    queries = page.queries
    rows = [row for panel in queries for row in panel.rows if row.shared is None]
    prompted = all(panel.query.prompt is not None for panel in queries)
    told = page.meaning or (_OF_IMAGES if prompted else _OF_LOSSES)
    source = " from the prompt below it" if prompted else ""
    asked = (
        f"A query is an image that the model made{source}; beside it stand the training examples that mattered most to "
        "it. "
        if prompted or told.images
        else "A query is something the model was asked; beside it stand the training examples that moved its answer "
        "most. "
    )
    return el(
        "aside.reading-help",
        el("h2", "How to read this page", id="reading-title"),
        el("p", asked),
        el("p", _signs(told, [row.signed for row in rows])),
        el(
            "p",
            "Each bar is a score relative to the largest one in its row; rows can have different units, so compare "
            "which examples are there and in what order, rather than the numbers.",
            " A weighted row trusts some layers of the model more than others." if page._weights else None,
            _BASELINES if baseline_names(queries) else None,
            f" {page.note}" if page.note else None,
        ),
        aria_labelledby="reading-title",
    )


_BASELINES = (
    " Baselines can be switched on: BM25 ranks training texts by the words they share with the query, hidden-state "
    "similarity by what the last layer of the model sees. Neither knows what training did."
)


def _signs(told: Meaning, signed: Sequence[bool]) -> list[Html | str]:
    """What scores mean, by the method; where it has signs and the scores of some row do not, that is said too."""
    note = f" {told.note}" if told.note else ""
    if told.hurts is None:
        return [el("strong.high", "High scores ▲"), f": {told.helps}.{note}"]
    words: list[Html | str] = []
    if any(signed):
        words += [
            "A ",
            el("strong.pro", "proponent ▲"),
            f" has a positive score: {told.helps}. An ",
            el("strong.opp", "opponent ▼"),
            f" has a negative score: {told.hurts}.{note}",
        ]
    if not all(signed):
        words.append(
            " Where not even the lowest score is negative there are no opponents: the highest scores are of examples "
            "that mattered, the lowest of those that hardly did."
        )
    return words


# As `items.picture` writes it. No text of a user can look like this: a < in it is written &lt;.
_IMG = re.compile(
    r'<img class="(?P<kind>picture[^"]*)" src="(?P<src>data:image/png;base64,[^"]*)" width="(?P<width>\d+)" '
    r'height="(?P<height>\d+)" alt="(?P<alt>[^"]*)" title="[^"]*">'
)


def dedupe_images(body: Html) -> Html:
    """The same page, with pictures that occur several times in one list, and drawn from there by <use>.

    An <svg> with a role and a label is to screen readers what an <img> with its alternative text is.
    """
    times = Counter(found["src"] for found in _IMG.finditer(body))
    number = {src: i for i, src in enumerate(src for src, n in times.items() if n > 1)}
    if not number:
        return body
    sizes: dict[str, tuple[str, str]] = {}

    def referring(found: re.Match[str]) -> str:
        src, width, height = found["src"], found["width"], found["height"]
        if src not in number:
            return found[0]
        sizes[src] = width, height
        return (
            f'<svg class="{found["kind"]}" viewBox="0 0 {width} {height}" role="img" aria-label="{found["alt"]}">'
            f'<title>{found["alt"]}</title><use href="#picture-{number[src]}"></use></svg>'
        )

    rest = _IMG.sub(referring, body)
    defined = [
        el(
            "symbol",
            el("image", href=src, width=width, height=height),
            id=f"picture-{number[src]}",
            viewBox=f"0 0 {width} {height}",
        )
        for src, (width, height) in sizes.items()
    ]
    held = el("svg.pictures", defined, width=0, height=0, aria_hidden="true")
    return Html(rest.replace("</body>", f"{held}</body>")) if rest.endswith("</body>") else Html(rest + held)


CSS = files("unde.ui.report").joinpath("style.css").read_text(encoding="utf-8")


def meaning(method: Method, task: Task | None = None) -> Meaning:
    """What the scores of a method say about queries of a task.

    >>> from unde.methods import TRAK
    >>> meaning(TRAK(), Classification()).helps
    'training on it lowers the model’s loss on the label asked about'
    """
    if isinstance(method, DAS):
        made = _DAS_SIGNED if method.weigh == "signed" else _DAS_SQUARED
    elif method.measure == "loss":
        made = _loss(method, task)
    else:
        made = _MEASURES.get(method.measure) or Meaning(
            f"what changes the task’s measure “{method.measure}” on this example changes it the same way on the query",
            "it changes the other way",
            "Whether training raises or lowers that measure is for the task to say.",
        )
    if isinstance(method, TracIn) and method.cosine:
        made = replace(made, note=f"{COSINE} {made.note}".strip())
    return replace(made, images=isinstance(task, Diffusion))


def _loss(method: Method, task: Task | None) -> Meaning:
    if isinstance(method, JourneyTRAK):
        where, so = "on the noisy images that the sampler passed on its way to this one", ""
    elif isinstance(task, Diffusion):
        where, so = "on the image", ": it learns to make images like it"
    elif isinstance(task, Classification):
        where, so = "on the label asked about", ""
    elif hasattr(task, "token_losses"):
        where, so = "on the query’s text", ": the text becomes likelier"
    else:
        where, so = "on the query", ""
    kind = "denoising loss" if isinstance(task, Diffusion) or isinstance(method, JourneyTRAK) else "loss"
    return Meaning(f"training on it lowers the model’s {kind} {where}{so}", "training on it raises that loss")


_DAS_SIGNED = Meaning(
    "leaving it out would move the noise that the model predicts for the image one way",
    "leaving it out would move that noise the other way",
    "It is the mean of the predicted noise that moves: which way is better for the image is not said.",
)
_DAS_SQUARED = Meaning(
    "leaving it out would change the noise that the model predicts for the image most, whichever way",
    None,
    "Scores are squares: there are no opponents, and a low score says that the example hardly mattered.",
)
COSINE = "Scores are cosines, from −1 to 1: how alike two gradients are, and not how strong."
_SURER = Meaning(
    "training on it makes the model surer of the label asked about",
    "training on it makes the model less sure of that label",
)
_MEASURES = {
    "margin": _SURER,
    "output": _SURER,
    "square": Meaning(
        "what makes the model predict more noise for it makes it predict more noise for the image too",
        "it makes it predict less",
        "The size of a prediction is no loss: a proponent is akin to the image in how the model sees both, and a "
        "positive score does not say that training on it lowered a loss.",
    ),
}
