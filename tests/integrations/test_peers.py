"""Files and tensors that other libraries really gave, against our own scores of the same model and data.

How they were made is in tests/data/peers/make.py.
"""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

import toy
from refusals import refused
from unde import UndeError, learn_weights
from unde.integrations import peers
from unde.tasks import CausalLM

FILES = Path(__file__).parent.parent / "data" / "peers"
TEXTS = ["The people of the west ask for roads.", "Peace with all nations, and honest trade."]


@pytest.fixture(scope="module")
def ours(tmp_path_factory):
    """TracIn with the gradients themselves, by layer."""
    index = toy.build(tmp_path_factory.mktemp("peers") / "idx", 22)
    return index.score(toy.data(4, seed=1))


def close(found, want):
    torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-6)


def test_kronfluence_by_module_is_tracin_by_layer(ours):
    for given in (
        FILES / "kronfluence/scores_modules",
        FILES / "kronfluence/scores_modules/pairwise_scores.safetensors",
    ):
        found = peers.kronfluence(given, ids=[f"t{i}" for i in range(22)], query_ids=list("abcd"))
        assert found.groups == ours.groups and found.shape == ours.shape
        close(found.by_group(), ours.by_group())
    assert found.top(3).indices.tolist() == ours.top(3).indices.tolist()
    assert found.top(1).query_ids == list("abcd") and found.top(1).ids[0][0].startswith("t")
    close(
        learn_weights(found, k=3, weight_decay=0.1).values, learn_weights(ours, k=3, weight_decay=0.1).values
    )


def test_kronfluence_as_a_whole_and_as_tensors(ours):
    whole = peers.kronfluence(FILES / "kronfluence/scores_whole")
    close(whole.total(), ours.total())
    assert whole.groups == ["all"]
    parts = ours.by_group()
    close(peers.kronfluence({"0": parts[..., 0], "2": parts[..., 1]}).by_group(), parts)
    tokens = torch.stack([parts[..., 0] / 4, parts[..., 0] * 3 / 4], 2)  # (Q, N, T), of single tokens
    close(peers.kronfluence({"0": tokens}).total(), parts[..., 0])
    close(
        peers.kronfluence({"all_modules": ours.total().bfloat16()}, target="utility").total(),
        -ours.total().bfloat16().float(),
    )


def test_dattri_is_transposed(ours):
    array = np.load(FILES / "dattri.npy")
    assert array.shape == (22, 4)
    found = peers.dattri(torch.from_numpy(array))
    close(found.total(), ours.total())
    close(peers.dattri(array, target="utility").total(), -ours.total())
    layers = {g: ours.by_group()[..., j].T for j, g in enumerate(ours.groups)}
    close(peers.dattri(layers).by_group(), ours.by_group())


@pytest.fixture(scope="module")
def language(tmp_path_factory):
    """The same four matrices of the same GPT-2, with the sum of token losses."""
    pytest.importorskip("transformers")
    from hf_toy import LINES, gpt2, index_of, tokenizer

    from unde.integrations.language import hf_setup

    setup = hf_setup(gpt2(), LINES[:6], tokenizer=tokenizer(), eval_queries=TEXTS, seq_len=64)
    for name, p in setup.model.named_parameters():
        p.requires_grad_(".h.0." in name and name.endswith("weight") and "ln" not in name)
    setup.task = CausalLM(reduction="sum")
    return index_of(setup, tmp_path_factory.mktemp("language") / "idx").score(setup.eval_queries)


def test_gradients_of_bergson_are_ours_by_module(language):
    found = peers.bergson(FILES / "bergson/train", FILES / "bergson/queries", query_ids=["x", "y"])
    assert [f"transformer.{g}" for g in found.groups] == language.groups and found.shape == (2, 6)
    close(found.by_group(), language.by_group())
    close(found.total([0.5, 2.0, 0.0, 1.0]), language.total([0.5, 2.0, 0.0, 1.0]))
    assert found.top(6).indices.tolist() == language.top(6).indices.tolist()
    assert found.top(1).query_ids == ["x", "y"]
    learned = learn_weights(found, k=2, weight_decay=0.1)
    close(learned.values, learn_weights(language, k=2, weight_decay=0.1).values)
    small = peers.bergson(FILES / "bergson/train", FILES / "bergson/queries", memory=1)
    close(small.total(), found.total())
    close(small.train.squared_norms(), found.train.squared_norms())


def test_scores_of_bergson_are_ours(language):
    for kind in ("scores", "tokens"):  # those of tokens add up
        close(peers.bergson(FILES / "bergson" / kind).total(), language.total())
    close(peers.bergson(FILES / "bergson/scores", target="utility").total(), -language.total())


def test_gradients_of_tokens_and_other_types(language, tmp_path):
    """Each gradient cut into three tokens, none for one example; and stored in bfloat16."""
    whole = np.fromfile(FILES / "bergson/train/gradients.bin", np.float32).reshape(6, -1)
    shutil.copytree(FILES / "bergson/train", tmp_path / "tokens")
    parts = np.repeat(whole[1:] / 3, 3, axis=0)
    parts.astype(np.float32).tofile(tmp_path / "tokens/gradients.bin")
    np.save(tmp_path / "tokens/offsets.npy", np.array([0, 0, 3, 6, 9, 12, 15]))
    info = json.loads((tmp_path / "tokens/info.json").read_text()) | {
        "attribute_tokens": True,
        "num_grads": 15,
    }
    (tmp_path / "tokens/info.json").write_text(json.dumps(info))
    found = peers.bergson(tmp_path / "tokens", FILES / "bergson/queries", memory=40_000).by_group()
    close(found[:, 1:], language.by_group()[:, 1:])
    assert not found[:, 0].any()
    shutil.copytree(FILES / "bergson/train", tmp_path / "half")
    torch.from_numpy(whole).bfloat16().view(torch.int16).numpy().tofile(tmp_path / "half/gradients.bin")
    (tmp_path / "half/info.json").write_text(
        json.dumps(info | {"base_dtype": "bfloat16", "num_grads": 6, "attribute_tokens": False})
    )
    half = peers.bergson(tmp_path / "half", FILES / "bergson/queries").by_group()
    torch.testing.assert_close(half, language.by_group(), rtol=0.02, atol=0.01)


def broken(tmp_path, kind, change):
    shutil.copytree(FILES / "bergson" / kind, tmp_path / kind)
    info = json.loads((tmp_path / kind / "info.json").read_text())
    (tmp_path / kind / "info.json").write_text(json.dumps(change(info) or info))
    return tmp_path / kind


@pytest.mark.parametrize(
    ("kind", "change", "said"),
    [
        (
            "train",
            lambda i: i.update(num_grads=7),
            r"has 18,432 bytes, its info.json tells of 21,504: is it finished",
        ),
        ("train", lambda i: i.update(base_dtype="float8"), "does not describe gradients as bergson 2 does"),
        ("train", lambda i: i.update(grad_sizes={}), "does not describe gradients"),
        (
            "train",
            lambda i: i["grad_sizes"].update({"h.0.mlp.c_proj": 10, "x": 246}),
            "other modules or projections",
        ),
        ("train", lambda i: i.clear(), "names neither scores nor gradients"),
        ("train", lambda i: i.update(attribute_tokens=True), r"cannot read .*offsets.npy"),
        ("train", lambda i: i.update(num_grads="6"), "does not describe"),
    ],
)
def test_gradients_that_cannot_be_right(tmp_path, kind, change, said):
    refused(said, peers.bergson, broken(tmp_path, kind, change), FILES / "bergson/queries")


def test_scores_that_are_not_finished(tmp_path):
    folder = broken(tmp_path, "scores", lambda i: None)
    info = json.loads((folder / "info.json").read_text())
    rows = np.memmap(folder / "scores.bin", np.dtype(info["dtype"]), "r+", shape=(6,))
    rows["written_1"][4] = False
    rows.flush()
    refused("not finished: the score of query 1 with row 4 is not written", peers.bergson, folder)
    with pytest.raises(UndeError, match="does not describe scores as bergson does"):
        peers.bergson(broken(tmp_path, "tokens", lambda i: i.pop("dtype") and None))


def test_what_is_not_theirs(tmp_path):
    cases = [
        (lambda: peers.kronfluence(tmp_path), "expected the folder scores_NAME that kronfluence wrote"),
        (
            lambda: peers.kronfluence(FILES / "dattri.npy"),
            "cannot read .*dattri.npy as scores of kronfluence",
        ),
        (lambda: peers.kronfluence({}), "there are no scores of kronfluence"),
        (lambda: peers.kronfluence({"a": torch.ones(3)}), "Self-influence has no queries"),
        (lambda: peers.kronfluence({"a": torch.ones(2, 3), "b": torch.ones(2, 4)}), "of different shapes"),
        (lambda: peers.kronfluence({"a": torch.ones(2, 3)}, target="loss?"), "Did you mean 'loss'"),
        (lambda: peers.dattri(torch.ones(3)), r"shape \(3,\): expected \(training examples, queries\)"),
        (lambda: peers.dattri(torch.ones(3, 2), ids=["a", "b"]), "looks transposed"),
        (lambda: peers.dattri(torch.full((3, 2), torch.nan)), "query 0, training example 0"),
        (lambda: peers.bergson(tmp_path), "holds no info.json: expected a folder that bergson wrote"),
        (
            lambda: peers.bergson(FILES / "bergson/train"),
            "holds gradients, no scores: give those of the queries",
        ),
        (
            lambda: peers.bergson(FILES / "bergson/train", FILES / "bergson/queries", ids=["a"]),
            "1 ids, the gradients are of 6",
        ),
    ]
    for ask, said in cases:
        refused(said, ask)
