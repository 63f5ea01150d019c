"""What is stored: features in each precision, losses, norms, and which examples were left out."""

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import toy
import unde
from unde import UndeError
from unde.store.codec import CODECS
from unde.tasks import Classification, Task

OF_NORM = {  # half a unit in the last place, and half a 127th of the largest of 30 entries, in each
    "float32": 0.0,
    "float16": 2.0**-11,
    "int8": 30**0.5 / 254,
}


@pytest.mark.parametrize("dtype", CODECS)
def test_tiny_gradients_beside_large_ones_do_not_vanish(tmp_path, dtype):
    """Examples weigh from 1e-9 to 1 in the loss. Unit gradients say the same whatever the storage."""

    class Weighted(Classification):
        def split(self, batch):
            return batch[0], batch[1]

        def loss(self, model, batch):
            return super().loss(model, batch[:2]) * batch[2]

    x, y = toy.data(22)
    weight = 10.0 ** -torch.arange(22).remainder(10)
    index = toy.build(tmp_path / "i", train_data=(x, y, weight), task=Weighted(), store_dtype=dtype)
    true = toy.gradients(toy.net(), Classification(), (x, y))
    got = toy.stored(index).rows(torch.arange(22))[0] / weight.unsqueeze(1)
    assert ((got - true).norm(dim=1) <= (OF_NORM[dtype] + 1e-6) * true.norm(dim=1)).all()
    cosine = index.score((x[:5], y[:5], weight[:5] * 0 + 1), method="tracin-cosine").total()
    assert cosine.diagonal() == pytest.approx(torch.ones(5), abs=2 * OF_NORM[dtype] + 1e-5)


@pytest.mark.parametrize("dtype", CODECS)
def test_extras(tmp_path, dtype):
    model = toy.net()
    index = toy.build(tmp_path / "i", model=model, store_dtype=dtype)
    data, parameters = toy.data(22), [p.numel() for p in model.parameters()]
    squares = toy.gradients(model, Classification(), data).square().split(parameters, dim=1)
    loss = Classification().loss(model, data).detach()
    torch.testing.assert_close(toy.stored(index).values("loss"), loss, rtol=1e-6, atol=1e-7)
    want = torch.stack([s.sum(1) for s in squares], 1)
    torch.testing.assert_close(toy.stored(index).values("squares"), want, rtol=1e-5, atol=1e-9)
    assert not index.skipped.any()
    with pytest.raises(UndeError, match=r"unknown stored value 'losses'.*Did you mean 'loss'"):
        toy.stored(index).values("losses")


def with_bad(where, value=float("nan")):
    x, y = toy.data(22)
    x[where, 1] = value
    return x, y


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_bad_gradient_names_the_example(tmp_path, value):
    with pytest.raises(UndeError, match=r"gradient of example 13 is NaN or infinite: .*on_bad='skip'"):
        toy.build(tmp_path / "i", train_data=with_bad([13], value))
    ids = [f"img{i}" for i in range(22)]
    with pytest.raises(UndeError, match=r"example 'img13' is NaN or infinite \(and of 1 more in its batch\)"):
        toy.build(tmp_path / "k", train_data=with_bad([13, 14], value), ids=ids)
    done = toy.shard_files(toy.build(tmp_path / "j", ids=ids))
    assert [p.name for p in (tmp_path / "k" / "shards").iterdir()] == [done[0].name]  # what came before stays


@pytest.mark.parametrize("method", ["tracin", "tracin-cosine", "trak"])
def test_skipped_examples_are_recorded_and_never_on_top(tmp_path, method):
    bad = [3, 13, 14]
    index = toy.build(tmp_path / "i", train_data=with_bad(bad), on_bad="skip", method=method)
    clean = toy.build(tmp_path / "clean", method=method)
    good = [i for i in range(22) if i not in bad]
    assert index.skipped.nonzero()[:, 0].tolist() == bad
    assert toy.stored(index).values("loss")[bad].isnan().all()
    assert torch.equal(toy.stored(index).values("squares")[bad], torch.zeros(3, 4))
    every = torch.arange(22)
    # batch mates are untouched
    assert torch.equal(toy.stored(index).rows(every)[0, good], toy.stored(clean).rows(every)[0, good])

    scores = index.score(toy.data(4, seed=5))
    total = scores.total()
    assert torch.equal(total[:, bad], torch.zeros(4, 3))
    assert total.isfinite().all()
    for largest in (True, False):
        top = scores.top(19, largest=largest)
        assert all(sorted(row) == good for row in top.indices.tolist())
        want = total[:, good].sort(dim=1, descending=largest).values
        torch.testing.assert_close(top.values, want)
    with pytest.raises(UndeError, match=r"top\(20\) of 19 training examples \(3 more were skipped\)"):
        scores.top(20)
    assert torch.equal(index.self_influence()[bad], torch.zeros(3))
    assert torch.equal(index.self_influence(normalize_top=3)[bad], torch.zeros(3))


def test_an_example_skipped_under_one_checkpoint_is_skipped(tmp_path):
    """Fourth powers: 6e18 for the large example under the first checkpoint, too large under the second."""

    class Quartic(Task):
        def loss(self, model, batch):
            return model(batch[0]).pow(4).sum(1)

    x, y = toy.data(22)
    x[5] = 1e4
    model = nn.Linear(5, 1)
    states = [{k: torch.full_like(v, scale) for k, v in model.state_dict().items()} for scale in (1.0, 1e6)]
    options = {"task": Quartic(), "checkpoints": states, "on_bad": "skip"}
    index = toy.build(tmp_path / "i", train_data=(x, y), model=model, **options)
    assert not toy.stored(index).values("skipped", 0).any()
    assert toy.stored(index).values("skipped", 1).nonzero()[:, 0].tolist() == [5]
    assert index.skipped.nonzero()[:, 0].tolist() == [5]


def test_a_bad_query_is_refused(tmp_path):
    index = toy.build(tmp_path / "i")
    x, y = toy.data(6, seed=4)
    x[4] = float("nan")
    with pytest.raises(UndeError, match="gradient of query 4 is NaN or infinite"):
        index.score((x, y))


def test_checkpoints_in_files_and_in_memory(tmp_path):
    states = toy.states(1, 2)
    for c, state in enumerate(states):
        save_file(state, tmp_path / f"{c}.safetensors")
    files = [tmp_path / "0.safetensors", str(tmp_path / "1.safetensors")]
    model = toy.net(7)
    a = toy.build(tmp_path / "a", checkpoints=states)
    b = toy.build(tmp_path / "b", checkpoints=files, model=model)
    assert toy.content(a.folder) == toy.content(b.folder)
    assert all(torch.equal(v, toy.net(7).state_dict()[k]) for k, v in model.state_dict().items())
    for c in range(2):
        want = toy.gradients(toy.net(c + 1), Classification(), toy.data(22))
        torch.testing.assert_close(toy.stored(b).rows(torch.arange(22))[c], want, rtol=1e-5, atol=1e-7)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(5, 5, bias=False), nn.Linear(5, 5, bias=False)
        self.second.weight = self.first.weight
        self.head = nn.Linear(5, 3)

    def forward(self, x):
        return self.head(self.second(self.first(x).tanh()))


def test_a_file_may_leave_out_tied_weights(tmp_path):
    model = Tied()
    state = {k: v for k, v in model.state_dict().items() if k != "second.weight"}
    index = toy.build(tmp_path / "i", model=model, checkpoints=[state])
    stored = [toy.stored(i).rows(torch.arange(3)) for i in (index, toy.build(tmp_path / "j", model=model))]
    assert torch.equal(*stored)
    del state["head.bias"]
    with pytest.raises(UndeError, match=r"leaves out \['head.bias'\]"):
        toy.build(tmp_path / "k", model=model, checkpoints=[state])


def test_checkpoints_that_are_the_same_or_damaged(tmp_path, capsys):
    live = toy.net().state_dict()
    toy.build(tmp_path / "i", checkpoints=[live, live])
    assert "checkpoints 0 and 1 hold the same weights" in capsys.readouterr().err
    save_file(toy.net().state_dict(), tmp_path / "c.safetensors")
    (tmp_path / "c.safetensors").write_bytes((tmp_path / "c.safetensors").read_bytes()[:-4])
    with pytest.raises(UndeError, match=r"c\.safetensors is damaged"):
        toy.build(tmp_path / "i", checkpoints=[tmp_path / "c.safetensors"])


def test_projections_are_in_the_index(tmp_path):
    """kron(2) of each matrix: the features are what the projection makes of the true gradients."""
    from unde.projection import Projection

    index = toy.build(tmp_path / "i", method=unde.methods.TracIn(projection="kron(2)"), seed=5)
    named = list(toy.net().named_parameters())
    true = toy.gradients(toy.net(), Classification(), toy.data(22)).split([p.numel() for _, p in named], 1)
    parts = [
        Projection("kron(2)", name, tuple(p.shape), seed=5)(g.view(-1, *p.shape))
        for (name, p), g in zip(named, true)
    ]
    stored = toy.stored(index).rows(torch.arange(22))[0]
    torch.testing.assert_close(stored, torch.cat(parts, 1), rtol=1e-5, atol=1e-6)
