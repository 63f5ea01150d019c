"""Examples of a setup as items of a page, their class names and labels."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unde import console
from unde.data import Rows, plain_text
from unde.errors import UndeError, unknown
from unde.gradients.model_state import frozen_eval
from unde.index.labels import LabelPredictions, predict_labels
from unde.setup import Setup
from unde.tasks import Classification, Diffusion, Task
from unde.tasks.diffusion import decode
from unde.ui.report.items import MAX_SIDE, Item
from unde.ui.report.pixels import to_pixels

Show = Callable[[Any], Any]
SECONDS = 300.0  # that the pictures of one page may take: one of a large VAE on a CPU takes some
_FIELDS = [f.name for f in fields(Item) if f.name != "id"]


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
    """The training examples and the queries of a setup as items, each made once."""

    def __init__(self, setup: Setup, classes: Sequence[str] | None = None, seconds: float = SECONDS) -> None:
        self.setup = setup
        self.classes = class_names(setup) if classes is None else classes
        self.train = setup.rows(setup.train_data)
        known = isinstance(setup.task, Classification)  # one label for each example
        self.true = true_numbers(setup, self.classes, len(self.train)) if known else None
        self.omitted = 0  # pictures that would have taken too long
        self._show = setup.show or (show_diffusion(setup.task) if isinstance(setup.task, Diffusion) else None)
        self._seconds, self._late = seconds, False
        self._items: dict[tuple[str, int], Item] = {}

    def example(self, i: int) -> Item:
        """Training example i, with the true label where it is known to differ. Numbers are compared, not names."""
        if ("train", i) not in self._items:
            item = self._item(self.train, i, i if self.setup.ids is None else self.setup.ids[i])
            if self.true is not None and int(self.true[i]) != class_number(self.setup.task, self.train, i):
                true = class_name(int(self.true[i]), self.classes)
                item = replace(item, true_label=true, mislabelled=True)
            self._items["train", i] = item
        return self._items["train", i]

    def query(self, queries: Rows, q: int, name: int | str) -> Item:
        if ("query", q) not in self._items:
            self._items["query", q] = self._item(queries, q, name)
        return self._items["query", q]

    def prepare(self, making: Iterable[Callable[[], Item]]) -> None:
        """Decode pictures of a diffusion model in the order of `making`; those after the time limit are omitted."""
        making = list(making)
        if not isinstance(self.setup.task, Diffusion):
            return
        end = time.monotonic() + self._seconds
        with console.progress("drawing pictures", len(making), unit="pictures") as advance:
            for make in making:
                before, self._late = len(self._items), time.monotonic() > end
                make()
                self.omitted += self._late and len(self._items) > before
                advance(1)
        self._late = True
        if self.omitted:
            console.note(f"{self.missing_note} Ask about fewer queries (--first) or show fewer (--top).")

    @property
    def missing_note(self) -> str:
        """A sentence about omitted pictures; empty if there are none."""
        if not self.omitted:
            return ""
        missing, within = console.counted(self.omitted, "picture"), console.duration(self._seconds)
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
            item = replace(item, label=class_name(class_number(self.setup.task, rows, i), self.classes))
        return item


def class_number(task: Task, rows: Rows, i: int = 0) -> int | None:
    """The class that the task reads from an example; None where it reads none."""
    if not isinstance(task, Classification):
        return None
    try:
        label = task.split(rows.batch([i]))[1]
    except UndeError:
        return None
    return int(label) if isinstance(label, Tensor) and label.numel() == 1 else None


def show_diffusion(task: Diffusion) -> Show:
    """A `show` for examples of a diffusion task: the image, decoded from latents where the task has a VAE, and the
    prompt."""

    def show(example: Any) -> Any:
        if isinstance(example, (tuple, list)) and len(example) == 1:
            example = example[0]
        columns = example if isinstance(example, Mapping) else {"images": example}
        image, latents, vae = columns.get("images"), columns.get("latents"), task.inputs.vae
        if image is None and isinstance(latents, Tensor) and vae is not None:
            with frozen_eval(vae):
                image = decode(vae, latents[None])[0]
        elif image is None:
            image = latents  # of a model of pixels
        if not isinstance(image, Tensor) or image.dim() != 3 or len(image) not in (1, 3):
            return {"prompt": _prompt(example)}
        return {"image": (image.float() / 2 + 0.5).clamp(0, 1).cpu(), "prompt": _prompt(example)}

    return show


def _prompt(example: Any) -> str | None:
    text = example.get("text") if isinstance(example, Mapping) else None
    return text if isinstance(text, str) else None


def _as_item(content: Any, name: int | str) -> Item:
    if isinstance(content, str):
        return Item(name, text=content)
    if isinstance(content, Mapping):
        for key in content:
            if key not in _FIELDS:
                raise unknown("key in what Setup.show returns", key, _FIELDS)
        return Item(name, **content)
    if isinstance(content, (Tensor, np.ndarray)) or _is_pillow(content):
        return Item(name, image=content)
    return Item(name)


def _guess(example: Any) -> Any:
    if isinstance(example, Mapping):
        image = next((x for key in ("image", "pixel_values") if _is_image(x := example.get(key))), None)
        return {"text": plain_text(example), "image": image, "label": label_of(example)}
    if isinstance(example, (tuple, list)) and len(example) == 2:
        return {"image": example[0] if _is_image(example[0]) else None, "label": label_of(example)}
    return example if _is_image(example) else None


def _is_pillow(x: Any) -> bool:
    return hasattr(x, "convert") and hasattr(x, "getbands")


def _is_image(x: Any) -> bool:
    if _is_pillow(x):
        return True
    if not isinstance(x, (Tensor, np.ndarray)) or x.ndim not in (2, 3):
        return False
    return x.ndim == 2 or x.shape[0] in (1, 3) or x.shape[-1] in (1, 3)


def label_of(example: Any) -> int | str | None:
    """The label of an example; None if it has none, or several.

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


def class_names(setup: Setup, outputs: int | None = None) -> list[str] | None:
    """The names of the classes in the order of the model's `outputs`, as far as that many are known; None if not.

    >>> class_names(Setup(torch.nn.Linear(3, 2), Classification(), [], classes=["cat", "dog"]))
    ['cat', 'dog']
    """
    if setup.classes is not None:
        names = [str(name) for name in setup.classes]
        if outputs is not None and len(names) != outputs:
            raise UndeError(
                f"Setup(classes=) has {len(names)} names, the model has {outputs} classes: expected one for each, in "
                "the order of its outputs"
            )
        return names
    classes = _of_features(setup.train_data) or _of_config(setup.model)
    return classes if classes is None or outputs in (None, len(classes)) else None


def _of_features(data: Any) -> list[str] | None:
    """Class names of the label column of a Hugging Face data set."""
    features = getattr(getattr(data, "dataset", data), "features", None)
    if not isinstance(features, Mapping):
        return None
    columns = (getattr(features.get(column), "names", None) for column in ("labels", "label"))
    return next(([str(name) for name in names] for names in columns if names), None)


def _of_config(model: Any) -> list[str] | None:
    """Class names in the config of a Hugging Face model; None for the default names LABEL_0, …"""
    mapping = getattr(getattr(model, "config", None), "id2label", None)
    if not isinstance(mapping, Mapping) or sorted(map(str, mapping)) != sorted(map(str, range(len(mapping)))):
        return None
    names = [str(mapping.get(i, mapping.get(str(i)))) for i in range(len(mapping))]
    default = all(name == f"LABEL_{i}" for i, name in enumerate(names))
    return None if default or len(set(names)) < len(names) else names


def class_name(label: Any, classes: Sequence[str] | None) -> Any:
    """The name of a class number; other labels are returned unchanged.

    >>> class_name(1, ["cat", "dog"]), class_name("a fox", ["cat", "dog"]), class_name(torch.tensor(0), ["cat", "dog"])
    ('dog', 'a fox', 'cat')
    """
    if isinstance(label, (Tensor, np.generic)):
        label = label.item()
    is_number = isinstance(label, int) and not isinstance(label, bool)
    return classes[label] if classes is not None and is_number and 0 <= label < len(classes) else label


def label_predictions(setup: Setup, rows: Rows) -> LabelPredictions | None:
    """Predictions and labels of some examples; None where the task has no classes."""
    if not isinstance(setup.task, Classification):
        return None
    predictions = predict_labels(setup.model, setup.task, rows)
    class_names(setup, predictions.classes)  # raises before anything long is computed
    return predictions


def true_numbers(setup: Setup, classes: Sequence[str] | None, examples: int) -> Tensor | None:
    """(N,) the class numbers that training examples should have, where the setup knows them.

    >>> data = (torch.zeros(2, 3), torch.tensor([0, 1]))
    >>> setup = Setup(torch.nn.Linear(3, 2), Classification(), data, true_labels=["dog", "dog"])
    >>> true_numbers(setup, ["cat", "dog"], 2)
    tensor([1, 1])
    """
    if setup.true_labels is None:
        return None
    if isinstance(setup.true_labels, str) or not hasattr(setup.true_labels, "__len__"):
        raise UndeError(
            f"Setup(true_labels=) is a {type(setup.true_labels).__name__}: expected a label for each training example"
        )
    labels: Any = setup.true_labels
    labels = labels.tolist() if hasattr(labels, "tolist") else list(labels)
    number = {name: i for i, name in enumerate(classes or ())}
    numbers = [number.get(label) if isinstance(label, str) else label for label in labels]
    bad = next((i for i, n in enumerate(numbers) if not isinstance(n, int) or isinstance(n, bool)), None)
    if bad is not None:
        known = f"one of {', '.join(list(classes)[:5])}" if classes else "a class number"
        raise UndeError(f"Setup(true_labels=) has {labels[bad]!r} for example {bad}: expected {known}")
    if len(numbers) != examples:
        raise UndeError(
            f"Setup(true_labels=) has {len(numbers)} labels for {examples} training examples: expected one for each"
        )
    return torch.tensor(numbers)
