"""`Recorder` in a plain loop, and audits logged to stand-ins of TensorBoard and Weights & Biases."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

import toy
import unde
from refusals import refused
from unde.integrations.training import Recorder, log_audit, read_record
from unde.tasks import Classification

DATA = toy.data(20)


def train(folder, optimizer_class=torch.optim.AdamW, steps=5, **recording):
    model = toy.net()
    optimizer = optimizer_class(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    states = []
    with Recorder(folder, model, optimizer, **recording):
        for _ in range(steps):
            optimizer.zero_grad()
            Classification().loss(model, DATA).mean().backward()
            optimizer.step()
            schedule.step()
            states.append({k: v.clone() for k, v in model.state_dict().items()})
    optimizer.step()  # after the block: no step of the recording
    return model, optimizer, states


def test_a_plain_loop_is_recorded_as_build_takes_it(tmp_path):
    model, _, states = train(tmp_path / "rec", every=2)
    record = read_record(tmp_path / "rec")
    assert record.checkpoint_weights == pytest.approx([0.1 * 0.5, 0.1 * 0.5**3])  # of steps 2 and 4
    for path, state in zip(record.checkpoints, (states[1], states[3]), strict=True):
        assert all(torch.equal(v, state[k]) for k, v in load_file(path).items())
    again, twin, _ = train(tmp_path / "again", steps=4, every=4)
    for name, p in again.named_parameters():  # the twin has made a fifth step since
        g = p.grad
        before = (twin.state[p]["exp_avg_sq"] - 0.001 * g**2) / 0.999
        torch.testing.assert_close(record.second_moments[name], before / (1 - 0.999**4), rtol=1e-3, atol=1e-9)
    index = unde.Index.build(
        model, Classification(), DATA, tmp_path / "i", method="tracin", progress=False, **record.options()
    )
    assert index.manifest.terms == 2 and index.manifest.matrices
    assert len(unde.select(index, {"a": toy.data(4, seed=1)}, 5)) == 5


def test_other_optimizers_have_no_second_moments(tmp_path):
    train(tmp_path / "rec", torch.optim.SGD, every=5)
    record = read_record(tmp_path / "rec")
    assert record.second_moments is None and set(record.options()) == {"checkpoints", "checkpoint_weights"}
    refused("1 checkpoints of an earlier training", train, tmp_path / "rec", every=5)
    refused("every is 0", train, tmp_path / "other", every=0)
    refused("holds no recorded checkpoint", read_record, tmp_path / "nowhere")
    model = toy.net()
    groups = [{"params": [p], "lr": 0.1 * i} for i, p in enumerate(model.parameters())]
    with Recorder(tmp_path / "groups", model, torch.optim.SGD(groups)) as recorder:
        refused("different learning rates", recorder.record)


class Writer:
    """A stand-in for SummaryWriter."""

    def __init__(self):
        self.scalars, self.texts = {}, {}

    def add_scalar(self, name, value, step):
        self.scalars[name] = value, step

    def add_text(self, name, text, step):
        self.texts[name] = text


def test_audits_are_logged(monkeypatch):
    labels = pytest.importorskip("pandas").DataFrame(
        {
            "is_label_issue": [True, False, True, False],
            "label_quality": [0.1, 0.9, 0.05, 0.8],
            "id": list("ab|d"),
        }
    )
    writer = Writer()
    want = {"unde/label_issues": 2, "unde/label_issue_share": 0.5, "unde/mean_label_quality": 0.4625}
    assert log_audit(labels, writer, 7) == pytest.approx(want)
    assert writer.scalars == {k: (pytest.approx(v), 7) for k, v in want.items()}
    assert writer.texts["unde/suspects"].splitlines()[2].startswith("| 2 | True | 0.05 | / |")
    wandb, logged = ModuleType("wandb"), []
    wandb.Table = lambda dataframe: len(dataframe)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    log_audit(labels, SimpleNamespace(log=lambda values, step: logged.append((values, step))), 8)
    assert logged == [({**want, "unde/suspects": 2}, 8)]
    refused("no column 'is_label_issue'", log_audit, labels[["id"]], writer)
    refused("cannot log to a dict", log_audit, labels, {})


def test_the_command_line_takes_what_was_recorded(tmp_path, monkeypatch):
    commands = pytest.importorskip("commands")
    name = commands.add_project(tmp_path, monkeypatch, commands.TRAINED, "recording")
    model = unde.setup.Recipe(f"{name}:trained").make().model
    optimizer = torch.optim.Adam(model.parameters())
    with Recorder("rec", model, optimizer, every=1):
        model(torch.ones(2, 6)).square().sum().backward()
        optimizer.step()
    base = f"build {name}:trained --method tracin --second-moments --out idx"
    commands.run(f"{base} --checkpoints rec")
    assert unde.Index.open("idx").manifest.matrices
    refused("without --checkpoints", commands.run, base)
    (tmp_path / "rec" / "second_moments.safetensors").unlink()
    refused("holds no second moments", commands.run, f"{base} --checkpoints rec")
