"""A Stable Diffusion pipeline so small that every test can afford its own."""

import json

import torch

from unde.integrations.diffusers import add_lora

SIDE, TOKENS, WIDTH = 8, 8, 6  # pixels; the VAE halves them
PROMPTS = ["a red cat", "a dog", "a red cat", "a fish"]


def tokenizer(folder):
    """One token for each letter."""
    from transformers import CLIPTokenizer

    letters = [*"abcdefghijklmnopqrstuvwxyz"]
    words = [*letters, *(c + "</w>" for c in letters), "<|startoftext|>", "<|endoftext|>"]
    (folder / "vocab.json").write_text(json.dumps({word: i for i, word in enumerate(words)}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    files = (str(folder / "vocab.json"), str(folder / "merges.txt"))
    return CLIPTokenizer(*files, model_max_length=TOKENS), len(words)


def unet(**more):
    from diffusers import UNet2DConditionModel

    torch.manual_seed(0)
    options = {
        "sample_size": SIDE // 2, "block_out_channels": (8, 8), "norm_num_groups": 4, "layers_per_block": 1,
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"), "up_block_types": ("UpBlock2D", "UpBlock2D"),
        "cross_attention_dim": WIDTH, "attention_head_dim": 2,
    }  # fmt: skip
    return UNet2DConditionModel(**options | more).eval()


def ddim(**more):
    """As the scheduler of Stable Diffusion 1."""
    from diffusers import DDIMScheduler

    options = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear", "steps_offset": 1}
    return DDIMScheduler(**options | {"clip_sample": False, "set_alpha_to_one": False} | more)


def save(folder):
    """A folder that `save_pretrained` wrote."""
    from diffusers import AutoencoderKL, StableDiffusionPipeline
    from transformers import CLIPTextConfig, CLIPTextModel

    words, count = tokenizer(folder)
    torch.manual_seed(0)
    text_encoder = CLIPTextModel(
        CLIPTextConfig(
            vocab_size=count, hidden_size=WIDTH, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
            max_position_embeddings=TOKENS, bos_token_id=count - 2, eos_token_id=count - 1,
        )
    )  # fmt: skip
    vae = AutoencoderKL(
        in_channels=3, out_channels=3, down_block_types=("DownEncoderBlock2D",) * 2, layers_per_block=1,
        up_block_types=("UpDecoderBlock2D",) * 2, block_out_channels=(4, 4), latent_channels=4, norm_num_groups=2,
        sample_size=SIDE,
    )  # fmt: skip
    parts = {
        "vae": vae,
        "text_encoder": text_encoder,
        "tokenizer": words,
        "unet": unet(),
        "scheduler": ddim(),
    }
    made = StableDiffusionPipeline(
        **parts, safety_checker=None, feature_extractor=None, requires_safety_checker=False
    )
    made.save_pretrained(folder / "saved")
    return folder / "saved"


def load(folder):
    from diffusers import StableDiffusionPipeline

    made = StableDiffusionPipeline.from_pretrained(folder, safety_checker=None, requires_safety_checker=False)
    made.set_progress_bar_config(disable=True)
    return made


def trained(pipeline, rank=2):
    """With LoRA whose second matrix is not zero any more."""
    with torch.no_grad():
        for i, p in enumerate(add_lora(pipeline.unet, rank)):
            p.copy_(0.3 * torch.randn(p.shape, generator=torch.Generator().manual_seed(i)))
    return pipeline


def pixels(n=4, seed=0):
    return torch.randint(
        256, (n, 3, SIDE, SIDE), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8
    )
