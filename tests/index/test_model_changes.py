"""A model that changes between a build, or an open, and the first question about it is refused, whatever is asked."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import models
import toy
import unde
from unde import Index, UndeError
from unde.methods import EKFAC, TRAK, TracIn

REFUSED = r"the model's weights are not those that .* was built with"
QUERIES = toy.data(3, seed=3)


def normalised(seed: int = 0) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)).eval()


def optimizer_steps(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = toy.data(8, seed=9)
    for _ in range(3):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()


def other_state(model: nn.Module) -> None:
    model.load_state_dict(normalised(1).state_dict())


def other_parameter(model: Any) -> None:
    model[0].weight = nn.Parameter(model[0].weight.detach() * 1.1)


def other_data(model: Any) -> None:
    model[0].weight.data = model[0].weight.data * 1.1


def data_entry(model: Any) -> None:
    model[0].weight.data[1, 1] += 1


def numpy_view(model: Any) -> None:
    model[0].weight.detach().numpy()[:] *= 1.01


def running_statistics(model: nn.Module) -> None:
    model.train()
    model(toy.data(8, seed=9)[0])
    model.eval()


CHANGES = [
    optimizer_steps,
    other_state,
    other_parameter,
    other_data,
    data_entry,
    running_statistics,
    numpy_view,
]
QUESTIONS: dict[str, Callable[[Index], Any]] = {
    "features": lambda index: index.features(QUERIES),
    "score": lambda index: index.score(QUERIES),
    "learn_weights": lambda index: index.learn_weights(),
    "learn_weights with options": lambda index: index.learn_weights(perturb="weights", examples=40),
    "learn_weights by a function": lambda index: index.learn_weights(perturb=lambda e, s, random: e),
    "append": lambda index: index.append(toy.data(4, seed=4), progress=False),
    "wrong labels": lambda index: index.audit_labels(progress=False),
}


@pytest.mark.parametrize("answered", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_every_change_is_noticed_by_the_next_score(tmp_path, change, answered):
    model = normalised()
    index = toy.build(tmp_path / "i", model=model)
    if answered:
        index.score(QUERIES)
    change(model)
    with pytest.raises(UndeError, match=REFUSED):
        index.score(QUERIES)
    model.load_state_dict(normalised().state_dict())
    fresh = toy.build(tmp_path / "j", model=normalised())
    assert torch.equal(index.score(QUERIES).total(), fresh.score(QUERIES).total())


@pytest.mark.parametrize("name", QUESTIONS)
def test_every_question_is_refused(tmp_path, name):
    index = toy.build(tmp_path / "i", 60, model=(model := normalised()))
    optimizer_steps(model)
    before = toy.content(index.folder)
    with pytest.raises(UndeError, match=REFUSED):
        QUESTIONS[name](index)
    assert toy.content(index.folder) == before


@pytest.mark.parametrize("change", [c for c in CHANGES if c not in (data_entry, numpy_view)])
def test_a_change_between_an_open_and_the_first_question(tmp_path, change):
    toy.build(tmp_path / "i", model=normalised())
    model = normalised()
    index = Index.open(tmp_path / "i", model=model, task=unde.tasks.Classification())
    change(model)
    with pytest.raises(UndeError, match=REFUSED):
        index.score(QUERIES)


def test_stored_query_features_need_no_model(tmp_path):
    model = normalised()
    index = toy.build(tmp_path / "i", model=model)
    features = index.features(QUERIES)
    want = index.score(features).total()
    optimizer_steps(model)
    assert torch.equal(index.score(features).total(), want)


def test_tokens_rescoring_and_removal(tmp_path):
    model = models.Tokens()
    rows = torch.randint(7, (12, 5), generator=torch.Generator().manual_seed(0))
    data = [{"input_ids": row, "labels": row} for row in rows]
    options = {"model": model, "task": unde.tasks.CausalLM(), "train_data": data}
    index = toy.build(tmp_path / "i", method=EKFAC(projection="kron(2)"), **options)
    plain = toy.build(tmp_path / "j", method=TracIn(projection="kron(2)"), **options)
    scores, tokens = plain.score(data[:2]), index.tokens(index.score(data[:2]))
    tokens(0, data[3])
    with torch.no_grad():
        model.head.weight[2, 1] += 1
    for ask in (lambda: tokens(0, data[3]), lambda: scores.rescore(3), lambda: index.remove(indices=[1])):
        with pytest.raises(UndeError, match=REFUSED):
            ask()


def test_a_question_that_was_answered_before_is_refused_after_a_change(tmp_path):
    """Copies for learning weights are kept from one call to the next."""
    model, method = normalised(), TRAK(projection="kron(3)")
    index = toy.build(tmp_path / "i", 400, model=model, pass_size=64, method=method)
    index.learn_weights()
    optimizer_steps(model)
    with pytest.raises(UndeError, match=REFUSED):
        index.learn_weights()


@pytest.mark.parametrize("files", [False, True])
@pytest.mark.parametrize("answered", [False, True])
def test_checkpoints(tmp_path, files, answered):
    states = [{k: v.clone() for k, v in normalised(seed).state_dict().items()} for seed in (1, 2)]
    paths = [tmp_path / f"{i}.safetensors" for i in range(2)]
    for path, state in zip(paths, states):
        save_file(state, path)
    index = toy.build(tmp_path / "i", model=(model := normalised()), checkpoints=paths if files else states)
    if answered:
        index.score(QUERIES)
    optimizer_steps(model)  # not one of the checkpoints
    index.score(QUERIES)
    states[1]["0.weight"][2, 3] += 1
    save_file(states[1], paths[1])
    with pytest.raises(UndeError, match=REFUSED):
        index.score(QUERIES)


def test_a_checkpoint_that_is_the_model_itself(tmp_path):
    """state_dict() without a copy follows the model."""
    model = normalised()
    index = toy.build(tmp_path / "i", model=model, checkpoints=[model.state_dict()])
    optimizer_steps(model)
    with pytest.raises(UndeError, match=REFUSED):
        index.score(QUERIES)


def test_a_change_while_a_build_runs(tmp_path):
    model = toy.net()
    x, y = toy.data(22)

    class Training:
        """Data whose last example is read while somebody trains the model."""

        reads = 0

        def __len__(self) -> int:
            return 22

        def __getitem__(self, i: int):
            Training.reads += i == 21
            if Training.reads > 4:
                with torch.no_grad():
                    model[0].weight += 0.1
            return x[i], y[i]

    index = toy.build(tmp_path / "i", model=model, train_data=Training())
    assert Training.reads > 4
    with pytest.raises(UndeError, match=REFUSED):
        index.score(QUERIES)
