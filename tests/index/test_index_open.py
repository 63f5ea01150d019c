"""Index.open gives back what was built, and refuses what it was not built from, saying what differs."""

import json

import pytest
import torch
from torch import nn

import toy
import unde
from unde import Groups, Index, UndeError
from unde.tasks import Classification


def refused(said, index, **given):
    with pytest.raises(UndeError, match=f"was made from something else. What differs: {said}"):
        Index.open(index.folder, **given)


@pytest.mark.parametrize("method", ["tracin", "tracin-cosine", "trak"])
@pytest.mark.parametrize("store_dtype", ["float32", "float16", "int8"])
def test_opened_scores_are_the_built_ones(tmp_path, method, store_dtype):
    options = {"method": method, "store_dtype": store_dtype}
    built = toy.build(tmp_path / "i", **options)
    opened = Index.open(tmp_path / "i", model=toy.net(), task=Classification())
    queries, weights = toy.data(4, seed=3), [0.3, 1.7]
    a = built.score(queries)
    for index in (opened, toy.build(tmp_path / "i", **options)):
        b = index.score(queries)
        assert torch.equal(a.total(), b.total())
        assert torch.equal(a.total(weights), b.total(weights))
        assert torch.equal(a.by_group(), b.by_group())
        assert torch.equal(a.top(5).indices, b.top(5).indices)
        assert torch.equal(built.self_influence(normalize_top=3), index.self_influence(normalize_top=3))
        assert (a.query_digests, a.provenance) == (b.query_digests, b.provenance)
        assert a.groups == b.groups == ["0", "2"]


def test_another_model_other_groups_and_all_differences_at_once(tmp_path):
    index = toy.build(tmp_path / "i")
    wider = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    refused(r"the model \(parameter '0.weight' has shape \[6, 5\] there, \[7, 5\] in", index, model=wider)
    shorter = nn.Sequential(nn.Linear(5, 6))
    refused(r"the model \(the one given has no parameter '2.weight'\)", index, model=shorter)
    refused(r"the model's weights \(same shapes, other values\)", index, model=toy.net(1))
    near = toy.net()
    with torch.no_grad():
        near[2].bias[1] += 1e-6
    refused("the model's weights", index, model=near)
    toy.reopen(index, groups=Groups.by_layer(toy.net()))
    refused(r"the groups \(2 there, 4 asked for", index, groups=Groups.by_tensor(toy.net()))
    mixed = Groups.by_pattern(toy.net(), {"0": "weight", "2": "bias"})
    refused(r"the groups \('0' is not the same\)", index, groups=mixed)
    given = {"model": toy.net(1), "groups": Groups.by_tensor(toy.net()), "train_data": toy.data(9)}
    refused(r"the model's weights .*; the groups .*; the length of the training data \(22", index, **given)


def test_buffers_are_part_of_the_model(tmp_path):
    model = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
    index = toy.build(tmp_path / "i", model=model)
    model(torch.randn(4, 5))  # in training mode: the running statistics move
    refused("the model's weights", index, model=model)


def test_another_task(tmp_path):
    class Margin(Classification):
        def __init__(self, scale=1.0):
            self.scale = scale

        def loss(self, model, batch):
            return self.scale * super().loss(model, batch)

    index = toy.build(tmp_path / "i")
    refused(r"the task \(Classification there, Margin given\)", index, task=Margin())
    scaled = toy.build(tmp_path / "j", task=Margin(2.0))
    refused(r"setting scale \(2.0 there, 1.0 given\)", scaled, task=Margin())


@pytest.mark.parametrize(
    ("field", "said"),
    [
        ("schema", "was written with index schema 99, this release reads 4"),
        ("projection_version", "projected with version 99 of the random matrices, this release draws 1"),
    ],
)
def test_another_version(tmp_path, field, said):
    index = toy.build(tmp_path / "i")
    path = index.folder / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {field: 99}))
    for use in (lambda: Index.open(index.folder), lambda: toy.build(index.folder)):
        with pytest.raises(UndeError, match=said):
            use()


def test_checkpoints_have_to_be_given_again(tmp_path):
    states = toy.states(1, 2)
    index = toy.build(tmp_path / "i", checkpoints=states)
    queries = toy.data(3, seed=4)
    same = Index.open(index.folder, model=toy.net(8), task=Classification(), checkpoints=states)
    assert torch.equal(index.score(queries).total(), same.score(queries).total())
    refused(r"the checkpoints \(2 there, 1 given; pass checkpoints=\)", index, model=toy.net())
    swapped = {"model": toy.net(), "checkpoints": states[::-1]}
    refused(r"the model's weights of checkpoint 0 \(same shapes", index, **swapped)


def test_without_a_model_only_stored_queries_can_be_scored(tmp_path):
    index = toy.build(tmp_path / "i")
    made = index.features(toy.data(3, seed=4), path=tmp_path / "q.safetensors")
    bare = Index.open(index.folder)
    assert torch.equal(bare.score(made).total(), index.score(made).total())
    kept = bare.features(toy.data(3, seed=4), path=tmp_path / "q.safetensors")
    assert torch.equal(kept.features, made.features)
    with pytest.raises(UndeError, match="opened without its model, task"):
        bare.score(toy.data(3, seed=4))


def test_sizes_of_memory():
    from unde.index.index import parse_bytes

    assert [parse_bytes(x) for x in ("1.5 kB", "3MiB", "2G", 7)] == [1500, 3 * 2**20, 2 * 10**9, 7]
    for wrong in ("a lot", "-1GB", "1..2GB", 0, -5, "0GB"):
        with pytest.raises(UndeError, match="memory"):
            parse_bytes(wrong)


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ({"store_dtype": "flaot16"}, "unknown store_dtype 'flaot16'.*Did you mean 'float16'"),
        ({"on_bad": "skp"}, "unknown on_bad 'skp'.*Did you mean 'skip'"),
        ({"method": "trac"}, "unknown method 'trac'.*Did you mean 'tracin'"),
        ({"groups": "layers"}, "unknown groups 'layers'.*Did you mean 'layer'"),
        ({"batch_size": 0}, "batch_size 0: expected at least 1"),
        ({"checkpoints": []}, "names no checkpoint"),
        ({"checkpoint_weights": [0.5, 0.5]}, "2 checkpoint_weights for 1 checkpoints"),
        ({"checkpoint_weights": [-1.0]}, "expected numbers ≥ 0"),
        (
            {"checkpoints": ["model.pt"]},
            r"model\.pt: expected a \.safetensors file.*pickles are never loaded",
        ),
        ({"checkpoints": ["gone.safetensors"]}, "does not exist"),
        (
            {"checkpoints": [{"0.weight": torch.zeros(6, 5)}]},
            r"does not fit the model: it leaves out \['0.bias'",
        ),
        (
            {"checkpoints": [nn.Linear(5, 3).state_dict()]},
            r"leaves out .* and has unknown \['weight', 'bias'\]",
        ),
        (
            {"checkpoints": [toy.net().state_dict() | {"0.bias": torch.zeros(9)}]},
            r"(?s)fit the model:.*size mismatch for 0\.bias",
        ),
        ({"method": unde.methods.TracIn(projection="none"), "exclude": ["^9"]}, "matches no trainable"),
        ({"groups": Groups({"a": ("0.weight",)})}, "leave out '0.bias'"),
    ],
    ids=lambda x: "-".join(x) if isinstance(x, dict) else "",
)
def test_bad_options(tmp_path, option, said):
    model = toy.net()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with pytest.raises(UndeError, match=said):
        toy.build(tmp_path / "i", model=model, **option)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_nothing_to_train_and_a_scalar_loss(tmp_path):
    class Mean(Classification):
        def loss(self, model, batch):
            return super().loss(model, batch).mean()

    with pytest.raises(UndeError, match="no trainable parameter"):
        toy.build(tmp_path / "i", model=toy.net().requires_grad_(False))
    said = r"gave a scalar for a batch of .*: expected one value for each example"
    with pytest.raises(UndeError, match=said):
        toy.build(tmp_path / "i", task=Mean())
