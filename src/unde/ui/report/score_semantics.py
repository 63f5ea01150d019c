"""What a score means: one sentence for what helps and one for what hurts, by what a method differentiates.

A score is ⟨g(q), K g(n)⟩ of gradients of one measurement: positive where a step that changes the measurement of the
training example changes that of the query the same way. What that says depends on the measurement. A loss is what
training lowers, so there a proponent is an example that lowers the query's loss; the other measurements are not what
training goes down, and say less.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from unde.methods import DAS, JourneyTRAK, Method, TracIn
from unde.tasks import Classification, Diffusion
from unde.tasks.base import Task


@dataclass(frozen=True)
class Meaning:
    """What positive and negative scores say; without `hurts` scores have no sign, and `helps` is of high ones."""

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


def meaning(method: Method, task: Task | None = None) -> Meaning:
    """What the scores of a method say about queries of a task.

    >>> from unde.methods import TRAK
    >>> meaning(TRAK(), Classification()).helps
    'training on it lowers the model’s loss on the label asked about'
    """
    if isinstance(method, DAS):
        made = _das(method)
    elif method.measure == "loss":
        made = _loss(method, task)
    else:
        made = _MEASURES.get(method.measure, _other(method))
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


def _das(method: DAS) -> Meaning:
    if method.weigh == "signed":
        return Meaning(
            "leaving it out would move the noise that the model predicts for the image one way",
            "leaving it out would move that noise the other way",
            "It is the mean of the predicted noise that moves: which way is better for the image is not said.",
        )
    return Meaning(
        "leaving it out would change the noise that the model predicts for the image most, whichever way",
        None,
        "Scores are squares: there are no opponents, and a low score says that the example hardly mattered.",
    )


def _other(method: Method) -> Meaning:
    of = f"the task’s measure “{method.measure}”"
    return Meaning(
        f"what changes {of} on this example changes it the same way on the query",
        "it changes the other way",
        "Whether training raises or lowers that measure is for the task to say.",
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
