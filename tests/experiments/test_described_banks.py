"""Trainings as banks describe them, against those written out for the models that are attributed."""

from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from unde.evaluate.bank.stacked import train_stacked
from unde.tasks import CausalLM

ROWS = np.arange(3, 27)  # of 40 examples


@pytest.fixture(autouse=True)
def small_batches():
    torch.set_num_threads(1)


def logits(model, x):
    with torch.no_grad():
        return model(x).logits


def alike(a, b, *, within):
    """Weights may wander along directions that make no difference; what the model says may not."""
    spread = float(a.std())
    assert spread > 1e-3
    assert float((a - b).abs().max()) < within * spread


@pytest.mark.parametrize("architecture", ["resnet", "vit"])
@pytest.mark.parametrize(("data_set", "shape"), [("mnist", (1, 28, 28)), ("cifar10", (3, 32, 32))])
def test_images(data_set, shape, architecture, monkeypatch):
    from experiments.shared import cifar10, digits
    from experiments.shared.classification_bank import training

    source = digits if data_set == "mnist" else cifar10
    make, _, lr, decay = source.RECIPES[architecture]
    monkeypatch.setitem(source.RECIPES, architecture, (make, 3, lr, decay))
    generator = torch.Generator().manual_seed(0)
    x, y = torch.rand(40, *shape, generator=generator), torch.randint(0, 10, (40,), generator=generator)
    described = training(data_set, architecture, (x, y))
    train = source.train if data_set == "mnist" else cifar10_written_out
    expected = train(architecture, x[ROWS], y[ROWS], seed=5)
    alike(logits(expected, x), logits(described(ROWS, 5), x), within=1e-2)
    stacked = train_stacked(described, [(ROWS, 5), (ROWS[::-1].copy(), 6)])
    alike(logits(expected, x), logits(stacked[0], x), within=1e-2)


def cifar10_written_out(architecture, x, y, seed):
    from experiments.shared import cifar10

    _, epochs, lr, decay = cifar10.RECIPES[architecture]
    model, generator = cifar10.initial(architecture).train(), torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=decay)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=epochs * -(-len(y) // 64))
    for _ in range(epochs):
        for batch in torch.randperm(len(y), generator=generator).split(64):
            loss = F.cross_entropy(model(cifar10.moved(x[batch], generator)).logits, y[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    return model.eval()


def language_written_out(model, tokens, seed):
    """An epoch in batches of 8."""
    from experiments.shared import corpora

    optimizer, task = corpora.adamw(model.parameters()), CausalLM()
    batches = torch.randperm(len(tokens), generator=torch.Generator().manual_seed(seed)).split(8)
    for step, batch in enumerate(batches):
        optimizer.param_groups[0]["lr"] = corpora.PEAK_LR * corpora.warm_then_cosine(len(batches), step)
        optimizer.zero_grad()
        task.loss(model.train(), {"input_ids": tokens[batch]}).mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return model.eval()


def test_language():
    from experiments.shared import corpora, language_bank

    tokens = torch.randint(0, 60, (40, 64), generator=torch.Generator().manual_seed(0))
    described = corpora.training(partial(language_bank.initial, vocabulary=60), tokens, epochs=1)
    expected = language_written_out(corpora.gpt2(60), tokens[ROWS], seed=5)
    found, optimizer = corpora.train(corpora.gpt2(60), tokens[ROWS], epochs=1, seed=5)
    alike(logits(expected, tokens[:4]), logits(found, tokens[:4]), within=1e-2)
    assert len(optimizer.state_dict()["state"]) == len(list(found.parameters()))
    alike(logits(expected, tokens[:4]), logits(described(ROWS, 5), tokens[:4]), within=1e-2)
    stacked = train_stacked(described, [(ROWS, 5), (ROWS, 6)])
    alike(logits(expected, tokens[:4]), logits(stacked[0], tokens[:4]), within=1e-2)


def test_denoisers():
    from experiments.shared import cifar2, denoising

    x = torch.randn(40, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    given = {"steps": 4, "lr": 1e-3, "batch_size": 8}
    described = denoising.training(lambda seed: cifar2.unet(), {"x": x}, **given)
    expected = written_out(cifar2.unet(), x[ROWS], seed=5, **given)
    t = torch.arange(4) * 200
    found = [described(ROWS, 5), *train_stacked(described, [(ROWS, 5), (ROWS, 6)])[:1]]
    for model in found:
        with torch.no_grad():
            alike(expected(x[:4], t).sample, model(x[:4], t).sample, within=1e-2)


def written_out(model: nn.Module, images, *, steps, seed, lr, batch_size):
    alphas, random = denoising_alphas(), torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=1e-6)
    line = torch.cat([torch.randperm(len(images), generator=random) for _ in range(2)])[: steps * batch_size]
    model.train()
    for step, rows in enumerate(line.split(batch_size)):
        for group in optimizer.param_groups:
            group["lr"] = lr * min(1.0, 10 * (step + 1) / steps) * 0.5 * (1 + np.cos(np.pi * step / steps))
        x, part = images[rows], 1000 / batch_size
        t = (torch.arange(batch_size) * part + torch.rand(batch_size, generator=random) * part).long()
        noise, a = torch.randn(x.shape, generator=random), alphas[t].view(-1, 1, 1, 1)
        optimizer.zero_grad()
        predicted = model(a.sqrt() * x + (1 - a).sqrt() * noise, t).sample
        (predicted - (a.sqrt() * noise - (1 - a).sqrt() * x)).square().mean().backward()
        optimizer.step()
    return model.eval()


def denoising_alphas():
    """β from 1e-4 to 0.02 in 1,000 steps."""
    return (1 - torch.linspace(1e-4, 0.02, 1000)).cumprod(0)
