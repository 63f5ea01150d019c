"""Small models with their data for the tests on a device, each made once, and indexes of them."""

import copy
import warnings
from functools import cache

import torch

import cases
import zoo
from cases import Case
from unde import Index
from unde.tasks import CausalLM, Diffusion

QUICK = {"progress": False, "projection": "kron(4)"}


def unet():
    from diffusers import UNet2DModel

    return UNet2DModel(
        sample_size=8, in_channels=2, out_channels=2, block_out_channels=(4, 8), layers_per_block=1, norm_num_groups=2,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=4,
    )  # fmt: skip


def diffusion():
    from diffusers import DDPMScheduler

    return Diffusion(DDPMScheduler(num_train_timesteps=100), timesteps=4)


def lora():
    import peft

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # GPT-2's layers are stored transposed: PEFT says it takes note
        return peft.get_peft_model(zoo.gpt2(True)(), peft.LoraConfig(r=2, target_modules=["c_attn"]))


CASES = {c.name: c for c in (cases.CASES + zoo.LANGUAGE + zoo.FAMILIES + zoo.CLASSIFIERS)}
MANY = {**zoo.MOE, "num_local_experts": 16}
CASES["mixtral-16"] = Case("mixtral-16", zoo.language_model("Mixtral", **MANY), cases.ragged, CausalLM)
CASES["unet"] = Case("unet", unet, lambda n: torch.rand(n, 2, 8, 8) * 2 - 1, diffusion)
CASES["lora"] = Case("lora", lora, cases.ragged, CausalLM)


@cache
def _made(name):
    return zoo.make(CASES[name], torch.float32)


def make(name, device="cpu"):
    """A model of its own, the task and the rows."""
    model, task, rows = _made(name)
    return copy.deepcopy(model).to(device), task, rows


def build(name, folder, device="cpu", **options):
    return Index.build(*make(name, device), folder, **(QUICK | options))


def stored(index):
    """(C, N, D) features of all examples."""
    shards = range(len(index.manifest.shards))
    return torch.cat([torch.stack(index._state.stored.blocks(s)).cpu() for s in shards], 1)


def assert_near(got, want, tolerance=1e-5):
    """Equal up to so much of the largest."""
    assert got.shape == want.shape
    assert float((got - want).abs().max()) <= tolerance * float(want.abs().max())
