"""Classes: what they are called (by the user, a data set of Hugging Face, or the config of a model), what the model
says of examples, and what their labels should be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unde.data import Rows
from unde.errors import UndeError
from unde.index.labels import LabelPredictions, predict_labels
from unde.setup import Setup
from unde.tasks import Classification


def class_names(setup: Setup, outputs: int | None = None) -> list[str] | None:
    """The names of the classes in the order of the model's `outputs`, as far as that many are known; None if not.

    >>> class_names(Setup(torch.nn.Linear(3, 2), Classification(), [], classes=["cat", "dog"]))
    ['cat', 'dog']
    """
    if setup.classes is not None:
        names = [str(name) for name in setup.classes]
        if outputs is not None and len(names) != outputs:
            raise UndeError(
                f"Setup(classes=) has {len(names)} names, the model tells {outputs} classes apart: expected one for "
                "each, in the order of its outputs"
            )
        return names
    found = _of_features(setup.train_data) or _of_config(setup.model)
    return found if found is None or outputs in (None, len(found)) else None


def _of_features(data: Any) -> list[str] | None:
    """Of the label column of a data set of Hugging Face."""
    features = getattr(getattr(data, "dataset", data), "features", None)
    if not isinstance(features, Mapping):
        return None
    for column in ("labels", "label"):
        names = getattr(features.get(column), "names", None)
        if names:
            return [str(name) for name in names]
    return None


def _of_config(model: Any) -> list[str] | None:
    """Of the config of a model of Hugging Face, unless its names are the ones that it makes up."""
    named = getattr(getattr(model, "config", None), "id2label", None)
    if not isinstance(named, Mapping) or sorted(map(str, named)) != sorted(map(str, range(len(named)))):
        return None
    names = [str(named.get(i, named.get(str(i)))) for i in range(len(named))]
    made_up = all(name == f"LABEL_{i}" for i, name in enumerate(names))
    return None if made_up or len(set(names)) < len(names) else names


def class_name(label: Any, classes: Sequence[str] | None) -> Any:
    """A label as it is shown: the name of a class number, and whatever else it is as it is.

    >>> class_name(1, ["cat", "dog"]), class_name("a fox", ["cat", "dog"]), class_name(torch.tensor(0), ["cat", "dog"])
    ('dog', 'a fox', 'cat')
    """
    if isinstance(label, (Tensor, np.generic)):
        label = label.item()
    is_number = isinstance(label, int) and not isinstance(label, bool)
    return classes[label] if classes is not None and is_number and 0 <= label < len(classes) else label


def answers_to(setup: Setup, rows: Rows) -> LabelPredictions | None:
    """What the model says of some examples beside what they are labelled; None where there are no classes."""
    if not isinstance(setup.task, Classification):
        return None
    found = predict_labels(setup.model, setup.task, rows)
    class_names(setup, found.classes)  # refused here, before anything long is computed
    return found


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
    known: Any = setup.true_labels
    given = known.tolist() if hasattr(known, "tolist") else list(known)
    number = {name: i for i, name in enumerate(classes or ())}
    found = [number.get(label) if isinstance(label, str) else label for label in given]
    bad = next((i for i, n in enumerate(found) if not isinstance(n, int) or isinstance(n, bool)), None)
    if bad is not None:
        known = f"one of {', '.join(list(classes)[:5])}" if classes else "a class number"
        raise UndeError(f"Setup(true_labels=) has {given[bad]!r} for example {bad}: expected {known}")
    if len(found) != examples:
        raise UndeError(
            f"Setup(true_labels=) has {len(found)} labels for {examples} training examples: expected one for each"
        )
    return torch.tensor(found)
