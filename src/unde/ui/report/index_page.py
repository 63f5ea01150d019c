"""One page of what an index says about some queries, with and without weights."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from unde import console
from unde.data import Rows
from unde.errors import UndeError
from unde.index import Index
from unde.index.labels import LabelPredictions
from unde.index.self_retrieval import WeightNoise
from unde.scoring import GroupScores
from unde.setup import Setup
from unde.ui.report.calibration import calibration_panel
from unde.ui.report.example_view import ExampleView
from unde.ui.report.page import Page
from unde.ui.report.panels import Tokens, add_baselines, query_panels, trust_panel, weights_panels
from unde.ui.report.score_semantics import meaning
from unde.ui.report.trust import TrustPanel
from unde.version import __version__
from unde.weights import Weights

if TYPE_CHECKING:
    from unde.index.token_scores import TokenScores

UNWEIGHTED, CALIBRATED = "unweighted", "calibrated"


def page_of(
    index: Index,
    setup: Setup,
    queries: Rows,
    scores: GroupScores,
    weights: Mapping[str, Weights],
    *,
    title: str,
    count: int = 5,
    names: Sequence[int | str] | None = None,
    contributors: Mapping[str, Any] | None = None,
    trust: bool = True,
    answers: LabelPredictions | None = None,
    labelled: bool = True,
    baselines: bool = True,
) -> Page:
    """The `count` strongest proponents and opponents of each query: unweighted, and under each named set of weights.

    Tokens are shaded where the setup knows their text. `trust` adds how many training examples find themselves, which
    takes some hundred passes of the model. `baselines` adds the top examples of BM25 and of hidden-state similarity for
    models of text, the second from a pass over the training data. The rest is as in `query_panels`.
    """
    view = ExampleView(setup)
    weights = {**_calibrated(scores, weights), **weights}
    ways: dict[str, Weights | None] = {UNWEIGHTED: Weights.uniform(scores.groups), **weights}
    count, shaded = min(count, scores.shape[1]), _has_tokens(setup)
    steps = 2 * count * len(ways) * len(queries)
    with console.progress("shading tokens", steps, shaded, unit="passages") as advance:
        panels = query_panels(
            setup,
            queries,
            scores,
            ways,
            which=range(len(queries)),
            count=count,
            names=names,
            tokens=_tokens(index, setup, scores, advance) if shaded else None,
            slack=_slack(index),
            contributors=contributors,
            answers=answers,
            labelled=labelled,
            view=view,
        )
    if baselines:
        panels = add_baselines(panels, setup, queries, scores, view, count)
    return Page(
        title,
        f"{scores.shape[1]:,} training examples, {scores.method.name} attributions",
        queries=panels,
        weights=weights_panels(weights, scores.groups),
        trust=_trust(index, scores, weights) if trust else None,
        meaning=meaning(scores.method, setup.task),
        calibration=calibration_panel(index.calibration if "calibration" in scores.provenance else None),
        note=view.missing_note,
        warnings=_warnings(index, scores, names),
        provenance={
            "unde": __version__,
            "index": str(index.folder),
            **scores.provenance["method"],
        },
    )


def _calibrated(scores: GroupScores, weights: Mapping[str, Weights]) -> dict[str, Weights]:
    """The weights of the calibration by their name on the page, unless other weights have it."""
    known = scores.default_weights
    return {CALIBRATED: known} if isinstance(known, Weights) and CALIBRATED not in weights else {}


def _warnings(index: Index, scores: GroupScores, names: Sequence[int | str] | None) -> list[str]:
    """What to know before the answers are read, said in lines too."""
    found = index.diagnose(scores if names is None else replace(scores, query_ids=names))
    for sentence in found:
        console.note(sentence)
    return found


def _slack(index: Index) -> float:
    """The share of a score that the parts of its tokens may miss: they are not rounded as what is stored is."""
    stored = index.manifest.codec
    return math.inf if stored.lossy else max(0.01, 3 * stored.rounding)


def _has_tokens(setup: Setup) -> bool:
    """Whether the parts that single tokens have in a score can be computed and shown."""
    return setup.pieces is not None and hasattr(setup.task, "token_losses")


def _tokens(index: Index, setup: Setup, scores: GroupScores, advance: console.Advance) -> Tokens:
    made: dict[int, TokenScores] = {}

    def tokens(q: int, i: int, weights: Weights | None) -> Tensor:
        if id(weights) not in made:
            made[id(weights)] = index.tokens(scores, weights)
        advance(1)
        return made[id(weights)](q, setup.train_data[i])

    return tokens


def _trust(index: Index, scores: GroupScores, weights: Mapping[str, Weights]) -> TrustPanel | None:
    """The panel, or None where copies cannot be made or examples are few, which is said in a line."""
    try:
        found = index.trust_of(weights, scores.method, perturb=_perturb(weights))
        return trust_panel(found, weights, UNWEIGHTED)
    except UndeError as e:
        console.note(f"the page has no panel of trust: {e}")
        return None


def _perturb(weights: Mapping[str, Weights]) -> str | None:
    """Noise on the model's weights where that is what weights were learned with: the task may know nothing else."""
    kinds = [set(w.provenance.get("strength", ())) for w in weights.values()]
    return "weights" if kinds and all(kind == {WeightNoise().name} for kind in kinds) else None
