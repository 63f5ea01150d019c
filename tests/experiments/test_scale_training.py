"""The training loop: the schedule, and that a killed training goes on to the same weights."""

import pytest
import torch
from experiments.scale.settings import Recipe
from experiments.scale.training import fit, rate, steps_of

RECIPE = Recipe(epochs=3, batch_size=4, lr=0.1, weight_decay=0.01, warm_up=0.25, final=0.1, max_grad_norm=1.0)


def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))


class Killed(Exception):
    pass


def trained(recipe, checkpoint=None, stop=None, rows=4):
    """Ten examples; with `stop` the training dies in that step."""
    x, seen = torch.randn(10, 3, generator=torch.Generator().manual_seed(1)), []
    made = model()

    def loss(model, part, draws):
        if stop is not None and len(seen) == stop:
            raise Killed
        seen.append(part.tolist())
        noise = torch.randn(len(part), 3, generator=draws)
        return model(x[part] + 0.1 * noise).square().squeeze(1)

    fit(made, loss, 10, recipe, seed=5, rows=rows, checkpoint=checkpoint, every=-1)
    return made, seen


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_a_killed_training_goes_on_to_the_same_weights(tmp_path, optimizer):
    recipe = Recipe(**{**vars(RECIPE), "optimizer": optimizer})
    whole, seen = trained(recipe)
    path = tmp_path / "checkpoint.pt"
    with pytest.raises(Killed):
        trained(recipe, path, stop=5)
    again, rest = trained(recipe, path)
    assert seen[:5] + rest == seen and len(rest) == 4
    for a, b in zip(whole.state_dict().values(), again.state_dict().values()):
        assert torch.equal(a, b)


def test_every_epoch_sees_every_example_once_in_another_order():
    _, seen = trained(RECIPE)
    epochs = [[x for part in seen[i : i + 3] for x in part] for i in (0, 3, 6)]
    assert all(sorted(order) == list(range(10)) for order in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert len(seen) == steps_of(10, RECIPE) == 9


def test_gradients_of_parts_add_up():
    """Without what depends on a batch; noise is drawn part by part, so there is none of that either."""
    x = torch.randn(8, 3, generator=torch.Generator().manual_seed(1))

    def loss(model, part, draws):
        return model(x[part]).square().squeeze(1)

    made = []
    for rows in (8, 3):
        torch.manual_seed(0)
        linear = torch.nn.Linear(3, 1)
        fit(
            linear,
            loss,
            8,
            Recipe(epochs=2, batch_size=8, lr=0.1, weight_decay=0.0, optimizer="sgd"),
            rows=rows,
        )
        made.append(linear.weight)
    torch.testing.assert_close(made[0], made[1])


def test_the_learning_rate_warms_up_and_follows_a_cosine():
    found = [rate(step, 100, RECIPE) for step in range(100)]
    assert found[0] == pytest.approx(0.1 / 25) and found[24] == found[25] == pytest.approx(0.1)
    assert found[25:] == sorted(found[25:], reverse=True)
    assert found[62] == pytest.approx(0.1 * (0.1 + 0.9 * 0.5), rel=0.05) and 0.01 <= found[99] < 0.0101
