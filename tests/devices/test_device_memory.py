"""The budget on a device: the check, the trial and the passes keep to it; what exceeds it is a clear error."""

import pytest
import torch
from settings import make
from torch import nn

import unde
from unde import Index, UndeError
from unde.devices import model_bytes
from unde.gradients.collector import Collector
from unde.tasks import Classification


def wide(width=600):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(20, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 3)
    )


def data(n=300):
    return torch.randn(n, 20), torch.randint(3, (n,))


def build_wide(folder, model, examples=300, **options):
    options = {"method": "tracin", "projection": "kron(4)", "progress": False} | options
    return Index.build(model, Classification(), data(examples), folder, **options)


@pytest.mark.parametrize(("size", "projection"), [(2, "kron(4)"), (3, "kron(4)"), (6, "none")])
def test_weights_and_budget_are_the_most_that_is_taken(size, projection, tmp_path, pretended):
    """In the check, the trial and the build; the check needs one set of gradients."""
    model = wide().to(pretended.NAME)
    budget = size * model_bytes(model)
    with pretended.limited(budget) as here:
        before = here.live
        index = build_wide(tmp_path / "i", model, device_memory=budget, projection=projection)
        assert here.peak - before <= budget
    assert index.manifest.resolved.pass_size > 1


def answers(method, model, index, queries, budget):
    """Of questions that compute gradients anew, of scoring, and of weight learning."""
    given = model, Classification(), data(20), queries, method
    options = {"device_memory": budget, "progress": False}
    yield "attribute", lambda: unde.attribute(*given, **options)
    if method == "ekfac":
        yield "in few products", lambda: unde.attribute(*given, **options, query_rank=2)
    yield "score", lambda: index.score(queries).total()
    yield "self-influence", lambda: index.self_influence()
    scores = index.score(queries)
    yield "rescore", lambda: scores.rescore(10).total()
    yield "learn", lambda: unde.learn_weights(scores, k=5, epochs=1)
    yield "fixed point", lambda: unde.learn_weights(scores, k=5, solver="fixed-point")


@pytest.mark.parametrize(("method", "projection", "size"), [("ekfac", "kron(4)", 30), ("tracin", "none", 6)])
def test_questions_keep_to_the_budget(method, projection, size, tmp_path, pretended):
    """The most that is taken at once, by a kernel that takes half of the budget, and by whole gradients."""
    model = wide(100).to(pretended.NAME)
    budget, queries = size * model_bytes(model), data(6)
    options = {"method": method, "projection": projection, "device_memory": budget}
    built = build_wide(tmp_path / "i", model, examples=100, **options)
    given = {"task": Classification(), "train_data": built.train_data.data, "device_memory": budget}
    index = Index.open(tmp_path / "i", model=model, **given)
    taken = {}
    for name, ask in answers(method, model, index, queries, budget):
        with pretended.limited(10 * budget) as here:
            before = here.live
            ask()
            taken[name] = (here.peak - before) / budget
    assert all(0 < share <= 1 for share in taken.values()), taken


def test_weights_are_no_part_of_a_pass(tmp_path):
    """Nor on the CPU: with a budget of little more than the weights many examples fit."""
    model = wide()
    index = build_wide(tmp_path / "i", model, memory=int(1.3 * model_bytes(model)))
    assert index.manifest.resolved.pass_size > 8


def test_a_trial_that_runs_out_of_memory_means_fewer_examples(tmp_path, monkeypatch, pretended):
    call, tried = Collector.__call__, []

    def limited(self, batch, ids, out=None):
        tried.append(len(ids))
        if len(ids) > 8:
            raise torch.OutOfMemoryError("full")
        return call(self, batch, ids, out)

    monkeypatch.setattr(Collector, "__call__", limited)
    model = wide().to(pretended.NAME)
    index = build_wide(tmp_path / "i", model, device_memory="300kB")
    assert index.manifest.resolved.pass_size == 8
    assert max(tried) <= 16


def test_a_build_that_runs_out_of_memory_names_the_budget(tmp_path, pretended):
    model = wide().to(pretended.NAME)  # in the forward pass: torch aborts if Python raises in a backward pass
    with (
        pretended.limited(int(1.3 * model_bytes(model))),
        pytest.raises(UndeError, match=r"pretended:0 ran out of memory.*device_memory="),
    ):
        build_wide(tmp_path / "i", model, batch_size=300)


def test_bad_devices_are_one_clear_error(tmp_path, pretended):
    model, task, rows = make("mlp")
    for device, said in (
        ("pretended:9", "cannot use the device 'pretended:9'"),
        ("nowhere", "Devices here: cpu, pretended:0"),
    ):
        with pytest.raises(UndeError, match=said):
            Index.build(model, task, rows, tmp_path / "i", device=device)
    with pretended.limited(100), pytest.raises(UndeError, match="does not fit into the memory of pretended"):
        Index.build(model, task, rows, tmp_path / "i", device=pretended.NAME)
    with pytest.raises(UndeError, match="cannot read device_memory 'much'"):
        Index.build(model, task, rows, tmp_path / "i", device_memory="much")
    model[2].weight = nn.Parameter(torch.empty(9, 12, device="meta"))
    with pytest.raises(UndeError, match=r"'2.weight' is not in memory"):
        Index.build(model, task, rows, tmp_path / "i")
    assert not (tmp_path / "i").exists()
