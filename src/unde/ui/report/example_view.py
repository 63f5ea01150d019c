"""How the examples of a setup are shown: as what its `show` says, or as the image or text that they plainly are."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np
from torch import Tensor

from unde import console
from unde.data import Rows, plain_text
from unde.errors import UndeError, unknown
from unde.gradients.model_state import frozen_eval
from unde.setup import Setup
from unde.tasks import Classification, Diffusion
from unde.tasks.diffusion import decode
from unde.ui.report.classes import class_name, class_names, true_numbers
from unde.ui.report.items import MAX_SIDE, Item
from unde.ui.report.pixels import to_pixels

Show = Callable[[Any], Any]
SECONDS = 300.0  # that the pictures of one page may take: one of a large VAE on a CPU takes some
_SHOWN = [f.name for f in fields(Item) if f.name != "id"]


def as_item(
    example: Any, name: int | str, show: Show | None = None, classes: Sequence[str] | None = None
) -> Item:
    """One example for a page. `classes` are the names of labels that are numbers.

    >>> as_item({"text": "to be or not to be", "label": 1}, 3, classes=["prose", "verse"]).label
    'verse'
    """
    item = _as_item(show(example) if show is not None else _guess(example), name)
    return replace(
        item, label=class_name(item.label, classes), true_label=class_name(item.true_label, classes)
    )


class ExampleView:
    """The training examples and the queries of a setup as a page shows them, each made once."""

    def __init__(self, setup: Setup, classes: Sequence[str] | None = None, seconds: float = SECONDS) -> None:
        self.setup = setup
        self.classes = class_names(setup) if classes is None else classes
        self.train = setup.rows(setup.train_data)
        known = isinstance(setup.task, Classification)  # one label for each example
        self.true = true_numbers(setup, self.classes, len(self.train)) if known else None
        self.left_out = 0  # pictures that would have taken too long
        self._show = setup.show or (show_diffusion(setup.task) if isinstance(setup.task, Diffusion) else None)
        self._seconds, self._late = seconds, False
        self._made: dict[tuple[str, int], Item] = {}

    def example(self, i: int) -> Item:
        """Training example i."""
        if ("train", i) not in self._made:
            name = i if self.setup.ids is None else self.setup.ids[i]
            self._made["train", i] = self._corrected(self._item(self.train, i, name), i)
        return self._made["train", i]

    def query(self, queries: Rows, q: int, name: int | str) -> Item:
        if ("query", q) not in self._made:
            self._made["query", q] = self._item(queries, q, name)
        return self._made["query", q]

    def prepare(self, making: Iterable[Callable[[], Item]]) -> None:
        """Pictures of a diffusion model, which have to be decoded, with a bar and within the time there is; what comes
        first in `making` is there first, and the rest goes without."""
        making = list(making)
        if not isinstance(self.setup.task, Diffusion):
            return
        end = time.monotonic() + self._seconds
        with console.progress("drawing pictures", len(making), unit="pictures") as advance:
            for make in making:
                before, self._late = len(self._made), time.monotonic() > end
                make()
                self.left_out += self._late and len(self._made) > before
                advance(1)
        self._late = True
        if self.left_out:
            console.note(f"{self.what_is_missing} Ask about fewer queries (--first) or show fewer (--top).")

    @property
    def what_is_missing(self) -> str:
        """A sentence about pictures that are not there; nothing if all are."""
        if not self.left_out:
            return ""
        missing, within = console.counted(self.left_out, "picture"), console.duration(self._seconds)
        return f"{missing} could not be drawn within {within}."

    def _item(self, rows: Rows, i: int, name: int | str) -> Item:
        example = rows[i]
        if self._late:
            return Item(name, prompt=_prompt(example))
        item = as_item(example, name, self._show, self.classes)
        if isinstance(self.setup.task, Diffusion) and item.image is not None:
            # A page of whole ones fills the memory.
            item = replace(item, image=to_pixels(item.image, MAX_SIDE))
        if item.label is None:
            item = replace(item, label=class_name(self._label(rows, i), self.classes))
        return item

    def _corrected(self, item: Item, i: int) -> Item:
        """With the true label where it is known to be another one. Numbers tell, whatever labels are called."""
        if self.true is None or int(self.true[i]) == self._label(self.train, i):
            return item
        return replace(item, true_label=class_name(int(self.true[i]), self.classes), mislabelled=True)

    def _label(self, rows: Rows, i: int) -> int | None:
        """The class number that the task reads from an example, where `show` does not tell it."""
        if not isinstance(self.setup.task, Classification):
            return None
        try:
            label = self.setup.task.split(rows.batch([i]))[1]
        except UndeError:
            return None
        return int(label) if isinstance(label, Tensor) and label.numel() == 1 else None


def show_diffusion(task: Diffusion) -> Show:
    """What a page shows of an example of a diffusion task: its image, through the VAE where the task has one and the
    example is given by its latents, and its prompt."""

    def show(example: Any) -> Any:
        if isinstance(example, (tuple, list)) and len(example) == 1:
            example = example[0]
        given = example if isinstance(example, Mapping) else {"images": example}
        image, latents, vae = given.get("images"), given.get("latents"), task.inputs.vae
        if image is None and isinstance(latents, Tensor):
            if vae is not None:
                with frozen_eval(vae):
                    image = decode(vae, latents[None])[0]
            else:
                image = latents  # of a model of pixels
        if not isinstance(image, Tensor) or image.dim() != 3 or len(image) not in (1, 3):
            return {"prompt": _prompt(example)}
        return {"image": (image.float() / 2 + 0.5).clamp(0, 1).cpu(), "prompt": _prompt(example)}

    return show


def _prompt(example: Any) -> str | None:
    found = example.get("text") if isinstance(example, Mapping) else None
    return found if isinstance(found, str) else None


def _as_item(shown: Any, name: int | str) -> Item:
    if isinstance(shown, str):
        return Item(name, text=shown)
    if isinstance(shown, Mapping):
        for key in shown:
            if key not in _SHOWN:
                raise unknown("key in what Setup.show returns", key, _SHOWN)
        return Item(name, **shown)
    if isinstance(shown, (Tensor, np.ndarray)) or _is_pillow(shown):
        return Item(name, image=shown)
    return Item(name)


def _guess(example: Any) -> Any:
    if isinstance(example, Mapping):
        return _guess_of_columns(example)
    if isinstance(example, (tuple, list)) and len(example) == 2:
        image = example[0] if _is_image(example[0]) else None
        return {"image": image, "label": label_of(example)}
    return example if _is_image(example) else None


def _guess_of_columns(example: Mapping[str, Any]) -> dict[str, Any]:
    text = plain_text(example)
    image = next((x for key in ("image", "pixel_values") if _is_image(x := example.get(key))), None)
    return {"text": text, "image": image, "label": label_of(example)}


def _is_pillow(x: Any) -> bool:
    return hasattr(x, "convert") and hasattr(x, "getbands")


def _is_image(x: Any) -> bool:
    if _is_pillow(x):
        return True
    if not isinstance(x, (Tensor, np.ndarray)) or x.ndim not in (2, 3):
        return False
    return x.ndim == 2 or x.shape[0] in (1, 3) or x.shape[-1] in (1, 3)


def label_of(example: Any) -> int | str | None:
    """The one label that an example plainly carries; None if it has none, or several.

    >>> label_of(("a picture", np.int64(3))), label_of({"label": "cat"}), label_of({"text": "to be"})
    (3, 'cat', None)
    """
    if isinstance(example, Mapping):
        y = next((example[key] for key in ("labels", "label") if key in example), None)
    else:
        y = example[1] if isinstance(example, (tuple, list)) and len(example) == 2 else None
    if isinstance(y, (Tensor, np.ndarray, np.generic)):
        return y.item() if (y.numel() if isinstance(y, Tensor) else y.size) == 1 else None
    return y if isinstance(y, (int, str)) else None
