"""A task whose code changed since an index was begun: the same features go on, others are refused."""

import pytest
import torch

import toy
from unde import Index, UndeError
from unde.tasks import Classification


def tasks():
    """Four versions of one task, all of the same name."""

    def made(loss):
        return type("Mine", (Classification,), {"loss": loss})()

    def plain(self, model, batch):
        return torch.nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")

    def written_otherwise(self, model, batch):
        x, y = batch
        logits = model(x)
        return logits.logsumexp(1) - logits.gather(1, y.unsqueeze(1))[:, 0]

    def doubled(self, model, batch):
        return 2 * torch.nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")

    def broken(self, model, batch):
        return torch.nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none") * float("nan")

    return [made(f) for f in (plain, written_otherwise, doubled, broken)]


PLAIN, OTHERWISE, DOUBLED, BROKEN = tasks()


def half_built(folder):
    index = toy.build(folder, task=PLAIN)
    whole = toy.content(folder)
    toy.shard_files(index)[1].unlink()
    return whole


def test_code_that_gives_the_same_features_goes_on(tmp_path):
    whole = half_built(tmp_path / "i")
    toy.build(tmp_path / "i", task=OTHERWISE)
    assert set(toy.content(tmp_path / "i")) == set(whole)
    index = Index.open(tmp_path / "i", model=toy.net(), task=OTHERWISE, train_data=toy.data(22))
    assert len(index) == 22


@pytest.mark.parametrize("other", [DOUBLED, BROKEN], ids=["doubled", "broken"])
def test_code_that_gives_others_is_refused(tmp_path, other):
    half_built(tmp_path / "i")
    left = toy.content(tmp_path / "i")
    with pytest.raises(UndeError, match=r"already holds another index.*Mine computes.*features of example 0"):
        toy.build(tmp_path / "i", task=other)
    assert toy.content(tmp_path / "i") == left
    toy.build(tmp_path / "i", task=PLAIN)
    with pytest.raises(UndeError, match=r"was made from something else.*Mine computes.*example 0"):
        Index.open(tmp_path / "i", model=toy.net(), task=other, train_data=toy.data(22))


def test_another_version_is_refused_without_data(tmp_path):
    toy.build(tmp_path / "i", task=PLAIN)
    raised = type("Mine", (type(PLAIN),), {"version": 2})()
    with pytest.raises(UndeError, match=r"version of Mine \(1 there, 2 given\)"):
        Index.open(tmp_path / "i", model=toy.net(), task=raised)


def test_tensors_of_a_task_count(tmp_path):
    class Weighted(Classification):
        def __init__(self, weights):
            self.weights = weights

        def loss(self, model, batch):
            return super().loss(model, batch) * self.weights[batch[1]]

    index = toy.build(tmp_path / "i", task=Weighted(torch.ones(3)))
    toy.shard_files(index)[0].unlink()
    for use in (
        lambda task: toy.build(tmp_path / "i", task=task),
        lambda task: Index.open(tmp_path / "j", model=toy.net(), task=task),
    ):
        toy.build(tmp_path / "j", task=Weighted(torch.ones(3)))
        with pytest.raises(UndeError, match="weights"):
            use(Weighted(torch.tensor([1.0, 2.0, 1.0])))
    toy.build(tmp_path / "i", task=Weighted(torch.ones(3)))


def test_a_lost_probe_is_written_again(tmp_path):
    half_built(tmp_path / "i")
    probe = tmp_path / "i" / "probe.safetensors"
    content = probe.read_bytes()
    probe.unlink()
    toy.build(tmp_path / "i", task=PLAIN)
    assert probe.read_bytes() == content
