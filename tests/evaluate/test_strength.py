"""Strengths of single cells against sums over their parameters in float64, ranked and correlated by others."""

import json

import numpy as np
import pytest
import torch
from group_scores import group_scores
from scipy.stats import spearmanr
from sklearn.metrics import precision_score
from sklearn.metrics.pairwise import cosine_similarity

from refusals import refused
from unde import Groups
from unde.evaluate import lds_strength, pattern_similarity, recall_strength, unet_cell
from unde.methods import DAS, TracIn
from unde.scoring.arrays import ArrayScores

ATTENTION = "attentions.0.transformer_blocks.0"
UNITS = {  # in the order of diffusers: mid_block is last
    f"down_blocks.0.{ATTENTION}.attn1.to_q.lora_A.default.weight": 3,
    f"down_blocks.0.{ATTENTION}.attn1.to_q.lora_B.default.weight": 2,
    f"down_blocks.0.{ATTENTION}.attn2.to_out.0.lora_A.default.weight": 3,
    f"up_blocks.1.{ATTENTION}.attn1.to_q.lora_A.default.weight": 3,
    f"up_blocks.1.{ATTENTION.replace('0', '1')}.attn1.to_q.lora_A.default.weight": 4,
    f"mid_block.{ATTENTION}.attn2.to_out.0.lora_A.default.weight": 2,
}
CELLS = {  # by the positions of the units above
    ("down_blocks.0", "attn1.to_q"): [0, 1],
    ("down_blocks.0", "attn2.to_out"): [2],
    ("up_blocks.1", "attn1.to_q"): [3, 4],
    ("mid_block", "attn2.to_out"): [5],
}
ROWS, COLUMNS = ["down_blocks.0", "mid_block", "up_blocks.1"], ["attn1.to_q", "attn2.to_out"]
Q, N, S, K = 9, 31, 24, 4
rng = np.random.default_rng(0)
QUERIES, TRAIN = (torch.tensor(rng.normal(size=(n, 17)), dtype=torch.float32) for n in (Q, N))
MASKS, UTILITY = rng.random((S, N)) < 0.5, rng.normal(size=(S, Q))
RELEVANT = {"style": rng.random((Q, N)) < 0.3, "subject": rng.random((Q, N)) < 0.2}


def alone(units):
    """(Q, N): the inner products of these units."""
    q, n = columns(units)
    return q @ n.T


def columns(units):
    ends, sizes = np.cumsum(list(UNITS.values())), list(UNITS.values())
    chosen = np.concatenate([np.arange(ends[u] - sizes[u], ends[u]) for u in units])
    return QUERIES.double().numpy()[:, chosen], TRAIN.double().numpy()[:, chosen]


def mean_lds(total):
    return np.mean([spearmanr(MASKS @ total[q], UTILITY[:, q]).statistic for q in range(Q)])


def mean_recall(total, relevant, without=()):
    found = []
    for q in range(Q):
        order = [n for n in np.argsort(-total[q]) if n not in without][:K]
        found.append(precision_score(relevant[q], np.isin(np.arange(N), order)))
    return np.mean(found)


def expected(metric, change=lambda total, units: total):
    table = np.full((len(ROWS), len(COLUMNS)), np.nan)
    for (row, column), units in CELLS.items():
        table[ROWS.index(row), COLUMNS.index(column)] = metric(change(alone(units), units))
    return table


@pytest.mark.parametrize("memory", [2**30, 8 * Q * N * 3, 1])
def test_strength_of_cells(memory):
    """However many cells fit into memory at a time."""
    scores = group_scores(QUERIES, TRAIN, UNITS, memory=memory)
    found = lds_strength(scores, MASKS, UTILITY)
    assert (found.rows, found.columns) == (ROWS, COLUMNS)
    np.testing.assert_allclose(found.values, expected(mean_lds), rtol=1e-6)
    recall = recall_strength(scores, RELEVANT, k=K)
    assert list(recall) == ["style", "subject"]
    for attribute, marks in RELEVANT.items():
        np.testing.assert_allclose(recall[attribute].values, expected(lambda t, m=marks: mean_recall(t, m)))


@pytest.mark.parametrize(("memory", "passes"), [(2**30, 1), (8 * Q * N * 3, 2), (1, 4)])
def test_the_training_side_is_read_once_for_as_many_cells_as_fit(memory, passes):
    scores = group_scores(QUERIES, TRAIN, UNITS, memory=memory)
    read, block = [], scores.train.block
    object.__setattr__(scores.train, "block", lambda s: (read.append(s), block(s))[1])
    recall_strength(scores, RELEVANT, k=K)
    assert len(read) == passes * len(scores.train.cuts)


FACTOR = np.linspace(1, 2, N) / (1 - np.linspace(0.1, 0.6, N))  # of DAS, as in group_scores
CHANGES = {
    "cosine": (
        TracIn(cosine=True),
        lambda total, units: total / np.outer(*(np.linalg.norm(x, axis=1) for x in columns(units))),
    ),
    "das before": (DAS(), lambda total, units: (total * FACTOR) ** 2),
    "das after": (DAS(weigh="after"), lambda total, units: sum((alone([u]) * FACTOR) ** 2 for u in units)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_strength_of_methods_that_are_no_plain_sums(name):
    method, change = CHANGES[name]
    scores = group_scores(QUERIES, TRAIN, UNITS, method=method)
    np.testing.assert_allclose(
        lds_strength(scores, MASKS, UTILITY).values, expected(mean_lds, change), rtol=1e-6
    )


def test_every_group_by_itself():
    scores = group_scores(QUERIES, TRAIN, UNITS)
    found = lds_strength(scores, MASKS, UTILITY, cells=None)
    assert found.rows == list(UNITS) and len(found.columns) == 1
    np.testing.assert_allclose(found.values[:, 0], [mean_lds(alone([u])) for u in range(6)], rtol=1e-6)


def test_cells_from_patterns_and_functions():
    scores = group_scores(QUERIES, TRAIN, UNITS)
    found = lds_strength(scores, MASKS, UTILITY, cells=(r"^(up|down)_blocks", r"attn\d"))
    assert (found.rows, found.columns) == (["down", "up"], ["attn1", "attn2"])
    table = [[mean_lds(alone([0, 1])), mean_lds(alone([2]))], [mean_lds(alone([3, 4])), np.nan]]
    np.testing.assert_allclose(found.values, table, rtol=1e-6)
    found = lds_strength(scores, MASKS, UTILITY, cells=lambda n: ("all", "B") if "lora_B" in n else None)
    np.testing.assert_allclose(found.values, [[mean_lds(alone([1]))]], rtol=1e-6)


def test_groups_are_placed_by_their_parameters_not_their_names():
    names = list(UNITS)
    groups = Groups(
        {"0:x": tuple(names[:2]), "1:x": (names[2],), "2:x": tuple(names[3:5]), "3:x": (names[5],)}
    )
    found = lds_strength(group_scores(QUERIES, TRAIN, UNITS, groups=groups), MASKS, UTILITY)
    np.testing.assert_allclose(found.values, expected(mean_lds), rtol=1e-6)
    wide = group_scores(QUERIES, TRAIN, UNITS, groups=Groups({"a": tuple(names[:3]), "b": tuple(names[3:])}))
    refused(r"group 'a' lies in several cells: .* use finer groups", lds_strength, wide, MASKS, UTILITY)
    finer = wide.regroup(Groups({n: (n,) for n in wide.partition.parameters}))  # the way out that it names
    np.testing.assert_allclose(lds_strength(finer, MASKS, UTILITY).values, expected(mean_lds), rtol=1e-6)


def test_skipped_examples_are_no_candidates():
    out = (0, 4, 5, 11, 30)
    found = recall_strength(group_scores(QUERIES, TRAIN, UNITS, skipped=out), RELEVANT, k=K)["style"]
    np.testing.assert_allclose(found.values, expected(lambda t: mean_recall(t, RELEVANT["style"], out)))


def test_a_cell_that_ranks_nothing_has_no_recall():
    parts = torch.randn(Q, N, 2)
    parts[:, :, 1] = 0
    scores = ArrayScores(parts, ["mid_block.a", "mid_block.b"])
    recall = recall_strength(scores, RELEVANT, k=K)["subject"]
    assert recall.columns == ["a", "b"] and np.isnan(recall.values[0, 1])
    np.testing.assert_allclose(recall.values[0, 0], mean_recall(parts[:, :, 0].numpy(), RELEVANT["subject"]))
    assert lds_strength(scores, MASKS, UTILITY).values[0, 1] == 0  # the convention of lds


def test_as_json():
    found = lds_strength(group_scores(QUERIES, TRAIN, UNITS), MASKS, UTILITY)
    read = json.loads(json.dumps(found.as_dict(), allow_nan=False))
    assert (read["rows"], read["columns"]) == (ROWS, COLUMNS)
    np.testing.assert_array_equal(np.array(read["values"], dtype=float), found.values)
    assert read["values"][1][0] is None


BAD = [
    ({"cells": lambda name: None}, "no group lies in a cell: cells leave out all 6"),
    ({"cells": ("(", "x")}, r"cells are \('\(', 'x'\), which are not both regular expressions"),
    ({"cells": "down"}, "cells are 'down': expected a function"),
    ({"cells": lambda name: "down"}, r"into 'down': expected \(row, column\), or None"),
]


@pytest.mark.parametrize(("options", "message"), BAD)
def test_bad_cells(options, message):
    refused(message, lds_strength, group_scores(QUERIES, TRAIN, UNITS), MASKS, UTILITY, **options)


def unet(kind):
    import diffusers

    attention = "Attn" if kind == "unconditional" else "CrossAttn"
    options = {"sample_size": 8, "block_out_channels": (8, 16), "layers_per_block": 1, "norm_num_groups": 4}
    options["down_block_types"] = (f"{attention}DownBlock2D", "DownBlock2D")
    options["up_block_types"] = ("UpBlock2D", f"{attention}UpBlock2D")
    if kind == "unconditional":
        return diffusers.UNet2DModel(attention_head_dim=4, **options)
    model = diffusers.UNet2DConditionModel(cross_attention_dim=8, attention_head_dim=4, **options)
    if kind == "lora":
        from peft import LoraConfig

        targets = ["to_q", "to_k", "to_v", "to_out.0", "ff.net.0.proj", "proj_in", "conv1"]
        model.add_adapter(LoraConfig(r=2, target_modules=targets))
    return model


SIDES = ("to_q", "to_k", "to_v", "to_out")


def places(model):
    """{id of a parameter: its cell}, from the modules themselves."""
    blocks = {f"down_blocks.{i}": b for i, b in enumerate(model.down_blocks)}
    blocks |= {f"up_blocks.{i}": b for i, b in enumerate(model.up_blocks)} | {"mid_block": model.mid_block}
    parts = []
    for row, block in blocks.items():
        for transformer in getattr(block, "attentions", []):
            for inner in getattr(transformer, "transformer_blocks", []):
                for attn in ("attn1", "attn2"):
                    parts += [(row, f"{attn}.{side}", getattr(getattr(inner, attn), side)) for side in SIDES]
                parts += [(row, "ff", inner.ff)]
                parts += [(row, f"attentions.{n}", getattr(inner, n)) for n in ("norm1", "norm2", "norm3")]
            plain = hasattr(transformer, "to_q")
            sides = (*SIDES, "group_norm") if plain else ("norm", "proj_in", "proj_out")
            parts += [(row, f"attentions.{side}", getattr(transformer, side)) for side in sides]
        for resnet in block.resnets:
            parts += [(row, f"resnets.{name}", child) for name, child in resnet.named_children()]
        for kind in ("downsamplers", "upsamplers"):
            parts += [(row, f"{kind}.conv", x.conv) for x in getattr(block, kind, None) or []]
    outside = ("conv_in", "time_embedding", "conv_norm_out", "conv_out")
    parts += [("(no block)", name, getattr(model, name)) for name in outside]
    return {id(p): (row, column) for row, column, module in parts for p in module.parameters()}


@pytest.mark.parametrize("kind", ["conditional", "unconditional", "lora"])
def test_block_and_component_of_every_parameter(kind):
    model = unet(kind)
    where, named = places(model), dict(model.named_parameters())
    assert {n: unet_cell(n) for n in named} == {n: where[id(p)] for n, p in named.items()}
    for n, p in named.items():  # layers as groups, and wrapped models
        assert unet_cell(n.rpartition(".")[0]) == unet_cell(f"base_model.model.{n}") == where[id(p)]
    rows, sides = zip(*map(unet_cell, named))
    assert {"down_blocks.0", "down_blocks.1", "mid_block", "up_blocks.0", "up_blocks.1"} <= set(rows)
    assert ("attn2.to_out" in sides) == (kind != "unconditional")


def test_other_names():
    processor = "up_blocks.1.attentions.0.transformer_blocks.0.attn1.processor.to_q_lora.down.weight"
    assert unet_cell(processor) == ("up_blocks.1", "attn1.to_q")
    assert unet_cell("mid_block") == ("mid_block", "all")
    refused(r"'transformer\.h\.0\.attn' is not .* Pass cells=", unet_cell, "transformer.h.0.attn")


def test_similarity_is_that_of_scikit_learn():
    patterns = rng.normal(size=(4, 20))
    patterns[1, 3] = patterns[2, 8] = np.nan
    found = pattern_similarity(dict(zip("abcd", patterns)))
    assert found.rows == found.columns == list("abcd")
    whole = np.delete(patterns, [3, 8], axis=1)
    np.testing.assert_allclose(found.values, cosine_similarity(whole))


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        ({"a": [1.0, 2.0], "b": [1.0]}, "patterns of {'a': 2, 'b': 1} groups"),
        ({}, "patterns of {} groups"),
        ({"a": [1.0, 2.0], "b": [0.0, np.nan]}, "pattern 'b' is zero in all 1 groups"),
        ({"a": [1.0, np.inf]}, "infinite values, the first at pattern 0, group 1"),
    ],
)
def test_bad_patterns(patterns, message):
    refused(message, pattern_similarity, patterns)
