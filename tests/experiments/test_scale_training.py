"""The training of all settings: the schedule, and that parts of a batch add up to it."""

import numpy as np
import pytest
import torch
from experiments.scale.settings import Recipe
from experiments.scale.study import PartTrainer, schedule_of, share_of_peak

from unde.evaluate import TrainingSpec
from unde.evaluate.bank.training_spec import isolated_rng

RECIPE = Recipe(epochs=3, batch_size=4, lr=0.1, weight_decay=0.01, warm_up=0.25, final=0.1, max_grad_norm=1.0)


def test_gradients_of_parts_add_up():
    """Beside the training of the library, which takes batches as a whole."""
    x = torch.randn(10, 3, generator=torch.Generator().manual_seed(1))
    spec = TrainingSpec(
        model=lambda seed: torch.nn.Linear(3, 1),
        data={"x": x, "y": x.sum(1)},
        loss=lambda model, batch: (model(batch["x"]).squeeze(1) - batch["y"]).square(),
        optimizer=torch.optim.AdamW,
        schedule=lambda optimizer, steps: schedule_of(optimizer, steps, RECIPE),
        epochs=3,
        batch_size=4,
        clip=1.0,
    )
    whole = spec(np.arange(10), 5)
    with isolated_rng(5):
        trainer = PartTrainer(spec, np.arange(10), 5)
    trainer.rows = 3
    losses = []
    for batch in trainer.batches:
        losses.append(float(spec.mean_loss(trainer.model, batch).detach()) - float(trainer.backward(batch)))
        trainer.step()
    assert max(map(abs, losses)) < 1e-6 and len(losses) == 9
    torch.testing.assert_close(trainer.finish().weight, whole.weight)


def test_the_learning_rate_warms_up_and_follows_a_cosine():
    found = [share_of_peak(100, RECIPE, step) for step in range(100)]
    assert found[0] == pytest.approx(1 / 25) and found[24] == found[25] == pytest.approx(1)
    assert found[25:] == sorted(found[25:], reverse=True)
    assert found[62] == pytest.approx(0.1 + 0.9 * 0.5, rel=0.05) and 0.1 <= found[99] < 0.101
