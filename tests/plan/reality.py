"""Real runs to hold plans against: small models, their data, and the same meter on real tensors."""

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from unde.data import Rows
from unde.gradients import floor, make_units, plan_coverage
from unde.gradients.factors import factor_sizes
from unde.gradients.feature_pass import FeaturePass, Measurement
from unde.gradients.meter import Meter
from unde.groups import trainable
from unde.methods import Method
from unde.plan.shapes import matrices
from unde.tasks import CausalLM, Classification, Diffusion, Task


@dataclass(frozen=True)
class Case:
    name: str
    model: Callable[[], nn.Module]
    data: Callable[[int], Any]
    task: Task

    def __str__(self) -> str:
        return self.name


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(30, 64), nn.Tanh(), nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 5))


def conv() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 24, 3, stride=2, groups=2),
        nn.GroupNorm(4, 24),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(24, 5),
    )


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    tokens = {"vocab_size": 60, "bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=32, n_head=2, n_positions=48, **tokens))


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 60}
    return LlamaForCausalLM(LlamaConfig(max_position_embeddings=48, **sizes, **heads))


def texts(n: int) -> Any:
    return {"input_ids": torch.randint(60, (n, 40))}


class Denoiser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.time = nn.Conv2d(2, 12, 3, padding=1), nn.Linear(1, 12)
        self.last = nn.Conv2d(12, 2, 3, padding=1)

    def forward(self, sample: torch.Tensor, timestep: torch.Tensor) -> torch.Tensor:
        time = self.time(timestep.to(sample.dtype)[:, None] / 100)
        return self.last(torch.tanh(self.first(sample) + time[:, :, None, None]))


def diffusion() -> Case:
    from diffusers import DDPMScheduler

    task = Diffusion(DDPMScheduler(num_train_timesteps=100), timesteps=6)
    return Case("diffusion", Denoiser, lambda n: torch.rand(n, 2, 6, 6) * 2 - 1, task)


CASES = [
    Case("mlp", mlp, lambda n: (torch.randn(n, 30), torch.randint(5, (n,))), Classification()),
    Case("conv", conv, lambda n: (torch.randn(n, 3, 12, 12), torch.randint(5, (n,))), Classification()),
    Case("gpt2", gpt2, texts, CausalLM()),
    Case("llama", llama, texts, CausalLM()),
]


def made(case: Case, examples: int) -> tuple[nn.Module, Any]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return case.model(), case.data(examples)


def metered(held: Any, run: Callable[[], Any], besides: Any = ()) -> Meter:
    """The meter of a run; what is held counts, `besides` does not."""
    gc.collect()
    meter = Meter()
    meter.hold(held)
    others = meter.hold(besides)
    meter.restart()
    with meter:
        run()
    meter.peak -= others
    return meter


def passes(case: Case, method: Method, size: int) -> dict[str, Meter]:
    """The passes of `size` examples on real tensors."""
    model, data = made(case, size)
    rows = Rows(data, case.task.collate)
    batch = rows.batch(range(size))
    weights, inputs = [*model.parameters(), *model.buffers()], tensors(batch)
    found = {
        "training": metered([*weights, *inputs], lambda: floor.plain(model, case.task, [batch])),
        "frozen": metered([*weights, *inputs], lambda: floor.frozen(model, case.task, [batch])),
    }
    units = make_units(model, trainable(model), str(method.projection), 0)
    held = [*weights, *matrices(units)]
    coverage = plan_coverage(model, case.task, rows, units)
    found["check"] = metered(held, lambda: plan_coverage(model, case.task, rows, units), tensors(data))
    described = [{"name": u.name, "shape": u.shape} for u in units]
    factors = factor_sizes(described, str(method.projection)) if method.factors else None

    def features() -> None:
        with FeaturePass(model, case.task, Measurement(units, factors=factors), coverage) as run:
            run.collect(batch, list(range(size)))

    return found | {"features": metered([*held, *inputs], features)}


def tensors(batch: Any) -> list[torch.Tensor]:
    if isinstance(batch, torch.Tensor):
        return [batch]
    return list(batch.values()) if isinstance(batch, dict) else list(batch)
