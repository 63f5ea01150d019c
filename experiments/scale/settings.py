"""The paper's settings: every number of its section 5 and appendix B in one place.

Where a number comes from is said beside it: "§5.1.1" and "B.1" are places in the paper; "silent" marks what the paper
does not say, with the standard that was taken instead. The damping λ (5e-3 … 50) and k and λ′ of weight learning
are searched as in the paper; it does not say on what they were chosen: the columns of the study `lds` differ in that.

A setting is a plain value: `dataclasses.replace` shrinks it to a size that a test can afford.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Recipe:
    """How a model is trained: warm-up, then a cosine down to `final` of the peak learning rate."""

    epochs: int
    batch_size: int
    lr: float
    weight_decay: float
    optimizer: str = "adamw"  # or "sgd", with momentum 0.9
    betas: tuple[float, float] = (0.9, 0.999)  # of AdamW
    warm_up: float = 0.0  # share of all steps
    final: float = 0.0  # share of the peak that the cosine ends at
    max_grad_norm: float | None = None


# --- image classification ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Vision:
    """ImageNet-50k (§5.1.1, table "Data usage" of B.1)."""

    name: str
    config: Mapping[str, Any]  # of transformers
    features: int  # k of the projection (B.3)
    recipe: Recipe
    top: int  # scores that normalise self-influence (B.2.2)
    train: int = 50_000  # of the training split
    learn: int = 1_000  # others of the training split
    evaluate: int = 1_000  # of the validation split
    subsets: int = 100  # halves (B.2.1)
    corrupted: float = 0.10  # share of wrong labels (§5.1.1), where there are any
    mislabelled: bool = False  # for mislabel detection only
    judged: int = 5_000  # training images whose self-influence is ranked (B.2.2)
    side: int = 224  # pixels; silent: the size both architectures were made for
    stored: int = 256  # silent: short side of which training takes random crops, mirrored or not
    groups: str = "layer"  # silent: "such as individual tensors or layers" (§4.1)
    memory: str = "16GB"


RESNET18 = Vision(
    name="imagenet-resnet18",
    config={
        "embedding_size": 64,
        "hidden_sizes": [64, 128, 256, 512],
        "depths": [2, 2, 2, 2],
        "layer_type": "basic",
        "num_labels": 1000,
    },
    features=11_264,  # B.3
    # silent: SGD of the paper that introduced ResNets, with a cosine in place of its three steps
    recipe=Recipe(epochs=90, batch_size=256, lr=0.1, weight_decay=1e-4, optimizer="sgd"),
    top=10,
)
VIT_B16 = Vision(
    name="imagenet-vit-b16",
    config={"image_size": 224, "patch_size": 16, "num_labels": 1000},  # else the defaults: B/16
    features=12_800,  # B.3
    # silent: what is usual for ViTs trained from scratch on ImageNet alone
    recipe=Recipe(
        epochs=300, batch_size=1024, lr=1e-3, weight_decay=0.05, warm_up=5 / 300, max_grad_norm=1.0
    ),
    top=100,
)


# --- language modelling -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Language:
    """GPT-2-small from scratch on WikiText-103 (§5.1.2, B.1).

    B.3 gives k = 196,608 for TracIn and TRAK and k = 442,368 for LoGRA with r = 96. These are 48 · 64² and 48 · 96²:
    two-sided projections of the four matrices of each of the 12 blocks, which is what is attributed here, with no
    embeddings, norms or biases. EKFAC takes LoGRA's features (B.3).
    """

    name: str = "wikitext103"
    pretrained: str = "GPT-2's tokenizer"
    config: Mapping[str, Any] = field(
        # GPT2Config's defaults are GPT-2-small; silent on dropout: none, as is usual now
        default_factory=lambda: {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    )
    length: int = 512
    train: int = 232_585  # sequences of the training split
    learn: int = 523  # of the test split
    evaluate: int = 487  # of the validation split
    subsets: int = 100  # B.2.1
    patch: int = 128  # proponents of a tail-patch: the batch size (B.2.3)
    projection: str = "kron(64)"  # of TracIn and TRAK
    logra: str = "kron(96)"  # of LoGRA and EKFAC
    exclude: tuple[str, ...] = (r"wte|wpe|ln_", r"\.bias$")
    # One matrix of 196,608² would take 619 GB, and the paper does not say how it was inverted. Blocks are by layer.
    trak_blocks: str = "layer"
    # batch size: B.2.3; silent: the rest, usual for GPT-2-small. The cosine ends at a tenth of the peak, which is also
    # the learning rate of a tail-patch step ("maintaining all original training hyperparameters").
    recipe: Recipe = Recipe(
        epochs=10,
        batch_size=128,
        lr=6e-4,
        weight_decay=0.1,
        betas=(0.9, 0.95),
        warm_up=0.02,
        final=0.1,
        max_grad_norm=1.0,
    )
    groups: str = "layer"
    store_dtype: str = "float16"
    memory: str = "96GB"


WIKITEXT103 = Language()


# --- diffusion --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Diffusion:
    """Denoisers and the images they generate (§5.1.3, B.1).

    The paper has 500 query images in B.2.1 ("for each LDS evaluation for diffusion") and B.4 (N_q), and 1,000 in the
    table of B.1: 500 are taken, for each role.
    """

    name: str
    recipe: Recipe
    side: int  # pixels
    train: int
    classes: tuple[str, ...] = ()  # equally many of each; none: all images, with captions
    prompt: str | None = None  # of a class; None: captions, or no prompt at all
    rank: int | None = None  # of LoRA; None trains the whole UNet from scratch
    unet: Mapping[str, Any] | None = None  # its config, where it is trained from scratch
    pretrained: str | None = None
    learn: int = 500  # generated images (B.4)
    evaluate: int = 500  # with other seeds (B.2.1)
    subsets: int = 64  # B.2.1
    timesteps: int = 50  # of losses and gradients (B.2.1)
    steps: int = 50  # of DDIM (B.1)
    guidance: float = 7.5  # B.1
    features: int = 25_472  # k of the projection (B.3)
    groups: str = "layer"
    memory: str = "8GB"
    # Recall@10 of each attribute of SB-Pokemon, with D-TRAK (§5.2)
    fine_learn: int = 200  # generated images for each attribute, of its train split (§5.2, B.4)
    repeats: int = 4  # of each of 5 × 5 × 5 combinations: 500 images a split
    k: int = 10


CIFAR2 = Diffusion(
    name="cifar2",
    # 200 epochs of 128 images, AdamW 1e-4 with decay 1e-6, cosine after a tenth of warm-up (B.1)
    recipe=Recipe(epochs=200, batch_size=128, lr=1e-4, weight_decay=1e-6, warm_up=0.1),
    side=32,
    train=5_000,
    classes=("automobile", "horse"),
    unet={  # the DDPM for CIFAR-10: 35,746,307 parameters, the 35.7M of B.1; dropout 0
        "sample_size": 32,
        "layers_per_block": 2,
        "block_out_channels": (128, 256, 256, 256),
        "down_block_types": ("DownBlock2D", "AttnDownBlock2D", "DownBlock2D", "DownBlock2D"),
        "up_block_types": ("UpBlock2D", "UpBlock2D", "AttnUpBlock2D", "UpBlock2D"),
        "attention_head_dim": None,
        "downsample_padding": 0,
        "flip_sin_to_cos": False,
        "freq_shift": 1,
        "norm_eps": 1e-6,
    },
)
BETAS = {"beta_start": 1e-4, "beta_end": 0.02, "beta_schedule": "linear", "num_train_timesteps": 1000}  # B.1

# "We use the same fine-tuning setup as for ArtBench-2" (B.1), for all that start from Stable Diffusion.
_FINE_TUNING: dict[str, Any] = {
    "recipe": Recipe(epochs=100, batch_size=64, lr=3e-4, weight_decay=1e-6, warm_up=0.1),
    "side": 256,
    "rank": 128,  # 25.5M parameters
    "pretrained": "a Stable Diffusion 1 pipeline for 256 × 256 pixels, such as lambdalabs/miniSD-diffusers",
    "groups": "tensor",  # 256 of them, as in the figure of weights (§4.2)
}
ARTBENCH2 = Diffusion(
    name="artbench2",
    train=5_000,
    classes=("post-impressionism", "ukiyo-e"),
    prompt="a {class} painting",
    **_FINE_TUNING,
)
NARUTO = Diffusion(name="naruto", train=1_221, **_FINE_TUNING)

# Table "The 30 categories" of B.1. The first five of each are the train split, the others the validation split.
CATEGORIES = {
    "subject": (
        "Cubone", "Jigglypuff", "Mewtwo", "Bulbasaur", "Lickitung",
        "Rhydon", "Gengar", "Snorlax", "Arcanine", "Eevee",
    ),
    "style": (
        "An acrylic pour painting", "A blacklight painting", "A risograph print", "A cyanotype style photo",
        "A pointillism painting", "A watercolor illustration", "A Gongbi style painting", "A sepia tone photo",
        "A red wash painting", "A charcoal pencil sketch",
    ),
    "background": (
        "in a misty marsh", "on a rocky beach", "in a sunny meadow", "in a sunflower field",
        "near a smoking volcano", "by a calm lake", "under aurora borealis", "on a frozen tundra",
        "in a bamboo forest", "beneath a waterfall",
    ),
}  # fmt: skip
GLUE = {"style": "", "subject": " of ", "background": ", "}  # "A [style] of [subject], [background]" (§5.2)


SB_POKEMON = Diffusion(
    name="sb-pokemon",
    train=600,  # 20 of each category
    classes=tuple(name for names in CATEGORIES.values() for name in names),
    prompt="{class}",  # silent: an image shows one category, so its prompt names that
    **_FINE_TUNING,
)


# --- a large language model -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Llama:
    """Llama-3-8B-Instruct, as it is, on OpenWebText (C.6)."""

    name: str = "llama-owt"
    pretrained: str = "Llama-3-8B-Instruct with its tokenizer, such as meta-llama/Meta-Llama-3-8B-Instruct"
    length: int = 512
    train: int = 99_642  # sequences of the first million entries
    entries: int = 1_000_000
    evaluate: int = 500  # queries: the model's continuations of snippets of training sequences
    learn: int = 500  # silent: as many, of other snippets
    snippet: int = 128  # silent: tokens of a query that are given; its loss is that of the others
    patch: int = 1  # top-1
    # silent: features (about as many as GPT-2 has above), what is attributed (all matrices but embeddings), and the
    # fine-tuning step (AdamW from fresh moments)
    projection: str = "kron(32)"
    exclude: tuple[str, ...] = ("embed_tokens|lm_head|norm",)
    lr: float = 1e-5
    groups: str = "layer"
    store_dtype: str = "float16"
    memory: str = "64GB"


LLAMA_OWT = Llama()
