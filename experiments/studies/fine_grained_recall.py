"""Who gave a picture its subject, its style, its background? (the paper's Recall@10 table, heatmaps and gallery)

Weights for an attribute are learned from 200 pictures generated from prompts that name a category of that attribute
only, of its train split. Recall@10 of D-TRAK is then taken on pictures that combine all three, of train and of
validation categories. Robots: pictures that the model generated, and "drawn" ones, what a perfect model would generate.
A judge that was trained on drawn pictures tells which generated ones show what they should; for each attribute recall
is given for all of them and for those. Emoji: real pictures held out from training. Weights are those of Algorithm 1 as
it stands; "hubs divided out" ones maximise the top-k objective on scores over the size of each training example's own,
with the k, the solver and the decay of the study `label_free`; those of "search" have the k and weight decay of the
paper's search, by known contributors of the learning pictures. Validation categories were used for
none. Writes a page to experiments/runs.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import experiments.shared.emoji as emoji
import experiments.shared.pictures as pictures
import experiments.shared.recognition as recognition
import experiments.shared.robots as robots
from experiments.datasets import Queries, robot_queries
from experiments.shared.cells import Cell, denoiser
from experiments.shared.label_free_objectives import divide_hubs
from experiments.shared.paths import HERE, RUNS
from experiments.studies.label_free import DECAY, K_HUBS
from unde import Weights, learn_weights
from unde.evaluate import fine_grained, recall_at_k, recall_strength, representation_distance, search
from unde.methods import DTRAK
from unde.scoring import GroupScores
from unde.ui.report import HeatmapPanel, Item, Page, QueryPanel, WeightsPanel

PAPER = "Table 6, Figures 2, 3 and 4"
VARIANTS = ("robots", "emoji")
BANKS = {}  # variants are named as banks are, which are not needed
DATA = {"emoji": ("emoji_subject_style_background_32.npz",)}
STUDIES = {"robots": robots, "emoji": emoji}
METHOD = DTRAK()
TARGETS = ("subject", "style", "background")
LEARN = 200  # pictures for each attribute
REPEATS = 4  # of each of the 125 combinations of a split
KS, DECAYS = (1, 5, 10, 20, 50, 100), (0.0, 0.1, 0.5, 1.0, 1.5)  # of the search
SHOWN = 4  # queries on the page, of each set


def learning_queries(study: str, attribute: str) -> Queries:
    data = STUDIES[study].data()
    count = len(data.train_categories[attribute])
    return data.queries("train", [attribute], repeats=LEARN // count)


def as_columns(study: str, asked: Queries, role: str) -> dict[str, Tensor]:
    """Pictures generated from the prompts, kept in runs/."""
    path = RUNS / f"{study}-{role}-{len(asked.prompts)}.safetensors"
    if not path.exists():
        samples = pictures.generate(STUDIES[study].attributed(), asked.prompts, role)
        save_file({"latents": samples.latents}, path)
    return {**load_file(path), "encoder_hidden_states": pictures.encode(asked.prompts)}


def score(cell: Cell, role: str, columns: dict[str, Tensor]) -> GroupScores:
    index = cell.index_for(METHOD)
    return index.score(index.features(columns, cell.features_path(METHOD, role)), METHOD)


def without_hubs(learn: GroupScores) -> Weights:
    return learn_weights(divide_hubs(learn), k=K_HUBS, weight_decay=DECAY, solver="fixed-point")


def evaluation(study: str) -> dict[str, tuple[Queries, dict[str, Tensor]]]:
    """What pictures of each set show, and the pictures."""
    sets = {}
    for split in ("train", "validation"):
        if study == "emoji":
            held = emoji.held_out(split)
            sets[split] = Queries(held.prompts, held.labels), emoji.as_columns(held)
            continue
        asked = robots.data().queries(split, repeats=REPEATS)
        drawn = robot_queries(split, repeats=REPEATS)
        sets[split] = asked, as_columns(study, asked, split)
        columns = {"latents": pictures.encode_pictures(drawn.images)}
        columns["encoder_hidden_states"] = pictures.encode(drawn.prompts)
        sets[f"{split}, drawn"] = Queries(drawn.prompts, drawn.labels), columns
    return sets


def on_recognised(
    scores: GroupScores,
    targets: dict[str, Weights | None],
    relevant: dict[str, np.ndarray],
    seen: dict[str, np.ndarray],
) -> dict[str, Any]:
    """Recall@10 for each attribute, on the queries in which the judge sees the right category of it."""
    tops = {name: scores.top(10, w).indices.numpy() for name, w in targets.items()}
    out: dict[str, Any] = {"queries": {a: int(rows.sum()) for a, rows in seen.items()}}
    for name, top in tops.items():
        found = {a: recall_at_k(top[rows], relevant[a][rows]) for a, rows in seen.items()}
        out[name] = {a: e.as_dict() for a, e in found.items()}
        shown = "  ".join(f"{a} {100 * e.mean:.1f} ± {100 * e.ci95:.1f}" for a, e in found.items())
        print(f"  recognised only, {name:20}{shown}")
    return out


def heatmaps(scores: GroupScores, relevant: dict[str, np.ndarray]) -> HeatmapPanel:
    found = recall_strength(scores, relevant)
    first = next(iter(found.values()))
    title = "Recall@10 of each part of the UNet alone"
    return HeatmapPanel(
        title, first.rows, first.columns, {a: m.values for a, m in found.items()}, measure="recall@10"
    )


def galleries(
    study: str,
    asked: Queries,
    shown: Tensor,
    scores: GroupScores,
    weights: dict[str, Weights],
    relevant: dict[str, np.ndarray],
) -> list[QueryPanel]:
    """Queries spread over the set, with the training pictures that each set of weights finds for them."""
    data = STUDIES[study].data()
    totals = {"no weights": scores.total()} | {name: scores.total(w) for name, w in weights.items()}
    return [
        QueryPanel.from_scores(
            Item(q, image=shown[q], prompt=asked.prompts[q]),
            lambda n: Item(n, image=data.images[n], prompt=data.prompts[n]),
            {name: total[q] for name, total in totals.items()},
            count=5,
            contributors={a: marks[q] for a, marks in relevant.items()},
        )
        for q in range(7, len(asked.prompts), max(1, len(asked.prompts) // SHOWN))
    ][:SHOWN]


def run(variant: str) -> dict[str, Any]:
    torch.set_num_threads(1)
    study = variant
    cell, data = denoiser(study, STUDIES[study]), STUDIES[study].data()
    results: dict[str, Any] = {"method": str(METHOD)}
    if study == "robots":
        results["judge"] = {}
    learn = {}
    for attribute in TARGETS:
        asked = learning_queries(study, attribute)
        learn[attribute] = score(cell, f"{attribute}-{LEARN}", as_columns(study, asked, attribute))
    weights = {a: learn_weights(scores) for a, scores in learn.items()}
    divided = {f"{a}, hubs divided out": without_hubs(scores) for a, scores in learn.items()}
    searches = {
        a: search(scores, data.contributors(learning_queries(study, a).labels, a), KS, DECAYS)
        for a, scores in learn.items()
    }
    for a, one in searches.items():
        print(f"search, {a}: {one}", flush=True)
    results["search"] = {a: one.as_dict() for a, one in searches.items()}
    targets = {**weights, **divided, **{f"{a}, search": one.weights for a, one in searches.items()}}
    results["weights"] = {name: dict(zip(w.groups, w.values.tolist())) for name, w in weights.items()}
    page: dict[str, Any] = {"queries": []}
    for name, (asked, columns) in evaluation(study).items():
        shown = pictures.to_pixels(columns["latents"]) / 2 + 0.5
        scores = score(cell, f"{name}-{len(asked.prompts)}", columns)
        relevant = {a: data.contributors(asked.labels, a) for a in TARGETS}
        encoder = recognition.encoder().features
        far = representation_distance(encoder, recognition.to_tensor(data.images), shown)
        found = fine_grained(scores, {"none": None, "rep. dist.": far, **targets}, relevant)
        print(f"\n{name} categories\n{found}", flush=True)
        results[name] = found.as_dict()
        if study == "robots":
            seen = recognition.recognised(shown, asked.labels)
            results["judge"][name] = {a: float(rows.mean()) for a, rows in seen.items()}
            print("  the judge sees what was asked for:", results["judge"][name])
            results[f"{name}, recognised"] = on_recognised(scores, {"none": None, **targets}, relevant, seen)
        page["queries"] += galleries(study, asked, shown, scores, weights, relevant)
        strength = heatmaps(scores, relevant)
    results["strength"] = {
        "rows": list(strength.rows),
        "columns": list(strength.columns),
        "recall": {a: np.asarray(v).round(4).tolist() for a, v in strength.maps.items()},
    }
    panels = [WeightsPanel(w.groups, w.values, name=name) for name, w in weights.items()]
    title = f"Subject, style and background: {study}"
    path = RUNS / f"fine_grained_{study}.html"
    Page(title, "D-TRAK, weights for one attribute each", weights=panels, heatmaps=[strength], **page).write(
        path
    )
    print(f"wrote {path.relative_to(HERE.parent)}")
    return results
