"""Rankings of wrong labels: which one finds most, and how the default was chosen."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from scipy.stats import t

from experiments.pages.book import Book, number, table

NAMES = {
    "cifar10-resnet": "CIFAR-10, ResNet",
    "mnist-resnet": "MNIST, ResNet",
    "cifar10-cnn": "CIFAR-10, CNN",
    "mnist-mlp": "MNIST, MLP",
}
DRAFTED = ("cifar10-resnet", "mnist-resnet")  # what the adjusted loss was drafted on
MEASURES = {"auc": "AUC", "1%": "among the first 1 %", "5%": "among the first 5 %"}
BASELINE, DEFAULT = "loss", "adjusted-loss"

Settings = Mapping[str, Any]  # by name: "unfitted, 5%", …


def settings(book: Book) -> dict[str, Settings]:
    found = book.results("wrong_labels", NAMES)
    return {name: r["settings"] for name, r in found.items()} if len(found) == len(NAMES) else {}


def trainings(found: Settings, ranking: str, measure: str) -> np.ndarray:
    """(trainings,) in %, the mean over settings."""
    return 100 * np.mean([setting["rankings"][ranking][measure] for setting in found.values()], 0)


def interval(values: np.ndarray, sign: bool = False, digits: int = 1) -> str:
    """Mean ± half of the 95 % interval over trainings.

    >>> interval(np.array([1.0, 2.0, 3.0]))
    '2.0 ± 2.5'
    """
    half = t.ppf(0.975, len(values) - 1) * values.std(ddof=1) / len(values) ** 0.5
    return f"{number(values.mean(), digits, sign)} ± {half:.{digits}f}"


def overall(found: Settings, ranking: str) -> float:
    """What rankings are chosen by: the mean of all measures over all settings."""
    return float(np.mean([trainings(found, ranking, measure) for measure in MEASURES]))


def rankings_table(book: Book, method: str | None = None) -> str:
    """Every ranking and combination (of one method), averaged over the settings of each data set."""
    sets = settings(book)
    if not sets:
        return book.missing([f"wrong_labels_{name}" for name in NAMES])
    head = [f"{NAMES[name]}: {words}" for name in sets for words in ("AUC", "1 %", "5 %")]
    names = dict.fromkeys(r for found in sets.values() for s in found.values() for r in s["rankings"])
    rows = [
        [
            f"**{name}**" if name == DEFAULT else name,
            *(interval(trainings(found, name, measure)) for found in sets.values() for measure in MEASURES),
        ]
        for name in names
        if method is None or "," not in name or name.endswith(f", {method}")
    ]
    return table(["ranking", *head], rows)


def best(found: Settings) -> str:
    names = next(iter(found.values()))["rankings"]
    return max(names, key=lambda name: overall(found, name))


def gains(found: Settings, ranking: str) -> list[str]:
    return [
        interval(trainings(found, ranking, m) - trainings(found, BASELINE, m), sign=True) for m in MEASURES
    ]


def gains_table(book: Book) -> str:
    rows = [[NAMES[name], *gains(found, DEFAULT)] for name, found in settings(book).items()]
    return table(["adjusted-loss minus loss", *MEASURES.values()], rows)


def choice_table(book: Book) -> str:
    """The best ranking of the trainings of one data set, judged on the other data set against the loss."""
    sets = settings(book)
    rows = []
    for chosen_on in DRAFTED if sets else ():
        ranking = best(sets[chosen_on])
        for name, found in sets.items():
            if name.partition("-")[0] != chosen_on.partition("-")[0]:
                rows.append([NAMES[chosen_on], ranking, NAMES[name], *gains(found, ranking)])
    return table(["chosen on", "best ranking there", "judged on", *MEASURES.values()], rows)


def settings_table(book: Book) -> str:
    """Setting by setting: how far the models are fitted, the loss, and the adjusted loss."""
    rows = []
    for name, found in settings(book).items():
        for setting, there in found.items():
            one = {setting: there}
            fitted = f"{100 * np.mean(there['training accuracy']):.0f}"
            rows.append([f"{NAMES[name]}, {setting.replace('%', ' %')}", fitted])
            for ranking in (BASELINE, DEFAULT):
                rows[-1] += [interval(trainings(one, ranking, measure)) for measure in MEASURES]
    short = ("AUC", "1 %", "5 %")
    head = ["setting", "training accuracy", *(f"{r}: {m}" for r in (BASELINE, DEFAULT) for m in short)]
    return table(head, rows)


def fact(book: Book, what: str) -> str:
    """One number of the text: images, trainings or minutes."""
    found = list(book.results("wrong_labels", NAMES).values())
    if what == "minutes":
        return f"{sum(r['seconds of trainings'] for r in found) / 60:.0f}"
    return f"{found[0][what]:,}" if found else "–"


AUDITED = {
    "cifar10": "CIFAR-10, CNN, 10 % wrong",
    "digits": "digits, MLP, 20 % wrong",
    "wine": "wine, MLP, 20 % wrong",
    "breast_cancer": "breast cancer, MLP, 20 % wrong",
    "iris": "iris, MLP, 20 % wrong",
}
AUDIT_MEASURES = {
    "auc": "AUC",
    "precision": "precision",
    "recall": "recall",
    "f1": "F1",
    "found at 10 %": "found among the first 10 %",
    "found at 20 %": "20 %",
}


def audits_table(book: Book) -> str:
    """Audits of labels by data set and tool; the estimate of `unde` beside its precision."""
    rows = []
    for variant, found in book.results("label_audit", AUDITED).items():
        for tool, measures in found["methods"].items():
            cells = [_over_seeds(measures.get(key)) for key in AUDIT_MEASURES]
            if "expected precision" in measures:
                cells[1] += f" (expected {_over_seeds(measures['expected precision'])})"
            name = "**unde audit**" if tool == "unde" else tool
            rows.append([AUDITED[variant] if tool == "unde" else "", name, *cells])
    return table(["", "", *AUDIT_MEASURES.values()], rows)


def _over_seeds(values: list[float] | None) -> str:
    """In %, with the 95 % interval over trainings where there are several."""
    if values is None:
        return "–"
    return interval(100 * np.array(values)) if len(values) > 1 else number(100 * values[0], 1)


def audits_missing(book: Book) -> str:
    return book.missing([f"label_audit_{variant}" for variant in AUDITED])


PARTS = {
    "label_audits": audits_table,
    "label_audits_missing": audits_missing,
    "label_rankings_all": rankings_table,
    "label_rankings": lambda book: rankings_table(book, "TRAK"),
    "label_gains": gains_table,
    "label_choice": choice_table,
    "label_settings": settings_table,
    "label_fact": fact,
}
