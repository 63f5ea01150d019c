"""The models that are measured, each with as many random examples as one run takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from unde import Setup
from unde.data import Rows
from unde.tasks import CausalLM, Classification, Diffusion

SEED = 0
TIMESTEPS, TOKENS, WORDS = 10, 256, 8192


def resnet() -> Setup:
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(
        depths=[2, 2, 2, 2], hidden_sizes=[64, 128, 256, 512], layer_type="basic", num_labels=10
    )
    data = (torch.randn(128, 3, 32, 32), torch.randint(0, 10, (128,)))
    return Setup(ResNetForImageClassification(config), Classification(), data)


def vit() -> Setup:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        image_size=32, patch_size=4, hidden_size=192, num_hidden_layers=6, num_attention_heads=3,
        intermediate_size=768, num_labels=10,
    )  # fmt: skip
    data = (torch.randn(128, 3, 32, 32), torch.randint(0, 10, (128,)))
    return Setup(ViTForImageClassification(config), Classification(), data)


def gpt2(tokens: int = TOKENS, width: int = 256) -> Setup:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=6,
        n_embd=width,
        n_head=8,
        n_positions=tokens,
        vocab_size=WORDS,
        bos_token_id=0,
        eos_token_id=0,
    )
    data = {"input_ids": torch.randint(0, WORDS, (32, tokens))}
    return Setup(GPT2LMHeadModel(config), CausalLM(), data)


def llama() -> Setup:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=WORDS, hidden_size=256, intermediate_size=704, num_hidden_layers=6, num_attention_heads=8,
        num_key_value_heads=4, max_position_embeddings=TOKENS, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    data = {"input_ids": torch.randint(0, WORDS, (32, TOKENS))}
    return Setup(LlamaForCausalLM(config), CausalLM(), data)


def ddpm() -> Setup:
    from diffusers import DDPMScheduler, UNet2DModel

    unet = UNet2DModel(
        sample_size=16,
        layers_per_block=1,
        block_out_channels=(64, 128, 128),
        down_block_types=("DownBlock2D", "AttnDownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "AttnUpBlock2D", "UpBlock2D"),
    )
    return Setup(unet, Diffusion(DDPMScheduler(), TIMESTEPS), torch.randn(32, 3, 16, 16))


def text() -> Setup:
    from diffusers import DDPMScheduler, UNet2DConditionModel

    unet = UNet2DConditionModel(
        sample_size=16,
        layers_per_block=1,
        block_out_channels=(64, 128, 128),
        down_block_types=("CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=256,
    )
    data = {"latents": torch.randn(32, 4, 16, 16), "encoder_hidden_states": torch.randn(32, 20, 256)}
    return Setup(unet, Diffusion(DDPMScheduler(), TIMESTEPS), data)


def lora() -> Setup:
    from unde.integrations.diffusers import add_lora

    setup = text()
    for p in add_lora(setup.model, rank=16):
        torch.nn.init.normal_(p, std=0.02)  # as if trained: fresh LoRA has gradients of zero
    return setup


@dataclass(frozen=True)
class Case:
    """`batch` is what people train with, `batches` of them are one run; `rounds` fit into a few minutes."""

    name: str
    title: str
    make: Callable[[], Setup]
    batch: int
    batches: int
    rounds: int

    @property
    def examples(self) -> int:
        return self.batch * self.batches

    def setup(self, seed: int = SEED) -> Setup:
        """The same weights and data in every process."""
        torch.manual_seed(seed)
        return self.make()


def rows_of(setup: Setup, count: int) -> Rows:
    """So many training examples, over and over if there are fewer."""
    data = setup.rows(setup.train_data)
    return Rows([data[i % len(data)] for i in range(count)], data.collate)


CASES = {
    case.name: case
    for case in (
        Case("resnet", "ResNet-18, 32 × 32 images", resnet, 32, 12, 9),
        Case("vit", "ViT, 6 layers, 192 wide, 32 × 32 images", vit, 32, 4, 7),
        Case("gpt2", "GPT-2, 6 layers, 256 wide, 256 tokens", gpt2, 8, 2, 6),
        Case("llama", "Llama, 6 layers, 256 wide, 256 tokens", llama, 8, 2, 6),
        Case("ddpm", "UNet of diffusers, 16 × 16, 10 timesteps", ddpm, 8, 2, 6),
        Case("text", "UNet with text, the same", text, 8, 1, 6),
        Case("lora", "its LoRA of rank 16", lora, 8, 1, 6),
    )
}
