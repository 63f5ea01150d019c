"""Checkpoints recorded while a real Trainer trains: the weights of that step, the rates of the schedule."""

import json

import pytest
import torch
from hf_toy import LINES, gpt2, gradient, index_of, sequences
from hf_toy import train as run_trainer
from safetensors.torch import load_file
from torch import nn

from refusals import refused
from unde import Setup, UndeError
from unde.checkpoints import load_checkpoint
from unde.integrations.transformers import CheckpointRecorder, read_record, recorded
from unde.tasks import CausalLM

pytest.importorskip("accelerate")
from transformers import TrainerCallback

RATE, STEPS, WARMUP = 0.01, 6, 2
DATA = sequences(LINES)


class Watch(TrainerCallback):
    """What another callback sees: the weights after every step."""

    def __init__(self):
        self.weights = {}

    def on_step_end(self, args, state, control, **kwargs):
        self.weights[state.global_step] = {k: v.clone() for k, v in kwargs["model"].state_dict().items()}


def train(tmp_path, *callbacks, **options):
    schedule = {"learning_rate": RATE, "warmup_steps": WARMUP, "max_steps": STEPS, "save_steps": 2}
    batches = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    options = {"save_strategy": "steps", **schedule, **batches, **options}
    return run_trainer(tmp_path / "out", DATA, *callbacks, **options)


def schedule(step):
    """The rate of a step, counted from 1: linear warm-up, then linear decay."""
    done = step - 1
    return RATE * (done / WARMUP if done < WARMUP else (STEPS - done) / (STEPS - WARMUP))


def test_weights_and_rates_are_those_of_the_step(tmp_path):
    watch = Watch()
    train(tmp_path, CheckpointRecorder(tmp_path / "rec"), watch)
    checkpoints, rates = recorded(tmp_path / "rec")
    assert [p.name for p in checkpoints] == [f"step-{s:08d}.safetensors" for s in (2, 4, 6)]
    assert rates == pytest.approx([schedule(s) for s in (2, 4, 6)])
    model = gpt2(seed=1)
    for path, step in zip(checkpoints, (2, 4, 6)):
        with load_checkpoint(model, [path]):
            assert set(watch.weights[step]) == set(model.state_dict())
            assert all(torch.equal(v, watch.weights[step][k]) for k, v in model.state_dict().items())
        assert "lm_head.weight" not in load_file(path) or "transformer.wte.weight" not in load_file(
            path
        )  # tied


def test_every_few_steps_instead_of_every_save(tmp_path):
    train(tmp_path, CheckpointRecorder(tmp_path / "rec", every=3), save_strategy="no")
    assert [e["step"] for e in json.loads((tmp_path / "rec" / "checkpoints.json").read_text())] == [3, 6]
    assert recorded(tmp_path / "rec")[1] == pytest.approx([schedule(3), schedule(6)])


def test_recorded_checkpoints_make_tracincp(tmp_path):
    trainer = train(tmp_path, CheckpointRecorder(tmp_path / "rec"))
    checkpoints, rates = recorded(tmp_path / "rec")
    moments, correction = read_record(tmp_path / "rec").second_moments, 1 - 0.999**STEPS
    for name, p in trainer.model.named_parameters():
        want = trainer.optimizer.state[p]["exp_avg_sq"] / correction
        torch.testing.assert_close(moments[name], want, rtol=1e-5, atol=0)
    setup = Setup(trainer.model, CausalLM(), DATA[:4])
    index = index_of(setup, tmp_path / "idx", checkpoints=checkpoints, checkpoint_weights=rates)
    expected = torch.zeros(4)
    for path, rate in zip(checkpoints, rates):
        state = load_file(path)
        query, *others = (gradient(e["input_ids"], state=state) for e in (DATA[5], *DATA[:4]))
        expected += rate * torch.stack([query @ other for other in others])
    torch.testing.assert_close(index.score(DATA[5:6]).total()[0], expected, rtol=1e-4, atol=1e-7)


def test_a_training_that_goes_on_replaces_what_it_passes_again(tmp_path):
    first, second = Watch(), Watch()
    train(tmp_path, CheckpointRecorder(tmp_path / "rec", every=1), first)
    went_on = CheckpointRecorder(
        tmp_path / "rec", every=3
    )  # so that of the steps 5 and 6, only 6 is passed again
    train(tmp_path, went_on, second, resume=str(tmp_path / "out" / "checkpoint-4"))
    checkpoints, rates = recorded(tmp_path / "rec")
    assert rates == pytest.approx([schedule(s) for s in (1, 2, 3, 4, 6)])
    for path, (step, seen) in zip(checkpoints, [(s, first) for s in (1, 2, 3, 4)] + [(6, second)]):
        found = load_file(path)
        assert found and all(torch.equal(v, seen.weights[step][k]) for k, v in found.items())


def test_two_trainings_do_not_mix(tmp_path):
    train(tmp_path, CheckpointRecorder(tmp_path / "rec"))
    with pytest.raises(UndeError, match="holds 3 checkpoints of an earlier training"):
        train(tmp_path, CheckpointRecorder(tmp_path / "rec"))


def test_recording_nothing_is_refused(tmp_path):
    with pytest.raises(UndeError, match="nothing would be recorded"):
        train(tmp_path, CheckpointRecorder(tmp_path / "rec"), save_strategy="no")
    refused("every is 0", CheckpointRecorder, tmp_path, every=0)
    refused("holds no recorded checkpoint", recorded, tmp_path / "nowhere")
    (tmp_path / "checkpoints.json").write_text('{"a": 1}')
    refused("not what a CheckpointRecorder writes", recorded, tmp_path)


def test_rates_that_differ_are_refused(tmp_path):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD([{"params": [model.weight], "lr": 0.1}, {"params": [model.bias], "lr": 0.2}])
    with pytest.raises(UndeError, match=r"different learning rates \[0.1, 0.2\]"):
        CheckpointRecorder(tmp_path).on_step_begin(None, None, None, optimizer=optimizer)


def test_views_of_one_memory_are_saved(tmp_path):
    from unde.integrations.training import save_state

    class Packed(nn.Module):
        def __init__(self):
            super().__init__()
            packed = torch.arange(12.0)
            self.register_buffer("a", packed[:6].view(2, 3))
            self.register_buffer("b", packed[6:].view(3, 2).T)
            self.register_buffer("c", self.a)
            self.register_buffer("d", packed[3:9])
            self.register_buffer("none", torch.empty(0))

    save_state(tmp_path / "w.safetensors", Packed().state_dict())
    found = load_file(tmp_path / "w.safetensors")
    assert set(found) == {"a", "b", "d", "none"}
    assert found["d"].tolist() == [3, 4, 5, 6, 7, 8]
    assert torch.equal(found["b"], torch.arange(6.0, 12.0).view(3, 2).T)
    assert [p.name for p in tmp_path.iterdir()] == ["w.safetensors"]
