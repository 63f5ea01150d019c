"""What readers of a page have at hand, and a test has not: a project, a model, data. All of it small.

`WORLDS` has, by page, what makes it in the current folder and which names it gives, and what is written smaller in the
code of the page before it is run.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

PROJECT = """
import torch, unde
from sklearn.datasets import load_digits

def make():
    x, y = map(torch.as_tensor, load_digits(return_X_y=True))
    x = x.float() / 16
    def train(indices, seed):
        torch.manual_seed(0)
        rows = torch.as_tensor(indices)
        model = torch.nn.Sequential(torch.nn.Linear(64, 16), torch.nn.ReLU(), torch.nn.Linear(16, 10))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
        for _ in range(60):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
            optimizer.step()
        return model
    with torch.random.fork_rng():
        model = train(range(300), 0)
    return unde.Setup(model, unde.tasks.Classification(), (x[:300], y[:300]), learn_queries=(x[300:330], y[300:330]),
                      eval_queries=(x[330:345], y[330:345]), show=lambda e: e[0].reshape(8, 8).numpy(), train=train)
"""
LINES = [
    f"The {what} of the {place} was {how} in the year {year}, and the Congress {did} it."
    for year, what in enumerate(("harvest", "treaty", "army", "debt", "railroad", "school"), 1801)
    for place in ("north", "west", "union", "south", "coast", "plains")
    for how, did in (("good", "praised"), ("poor", "regretted"), ("late", "noted"), ("great", "lauded"))
]


@dataclass(frozen=True)
class World:
    make: Callable[[], Mapping[str, Any]] = dict
    smaller: Mapping[str, str] = field(default_factory=dict)


def project() -> dict[str, Any]:
    """my_project/setup.py, and an index of it in runs/idx."""
    Path("my_project").mkdir()
    Path("my_project/setup.py").write_text(PROJECT)
    return {}


def indexed() -> dict[str, Any]:
    """The same with an index that remembers it, opened, and all that belongs to it."""
    from shell import Command, run

    import unde
    from unde.setup import Recipe

    project()
    run(Command(["unde", "build", "my_project.setup:make", "--out", "runs/idx", "--method", "tracin"]))
    s = Recipe("my_project.setup:make").make()
    index = unde.Index.open("runs/idx", model=s.model, task=s.task, train_data=s.train_data)
    given = {"model": s.model, "task": s.task, "train_data": s.train_data, "queries": s.eval_queries}
    return {**given, "torch": torch, "unde": unde, "index": index}


def calibrated() -> dict[str, Any]:
    """The same, and all that a training is described by."""
    from functools import partial

    import torch.nn.functional as F

    from unde.setup import Recipe

    names = indexed()
    setup = Recipe("my_project.setup:make").make()

    def make_model(seed: int) -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(64, 16), torch.nn.ReLU(), torch.nn.Linear(16, 10))

    def loss(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        return F.cross_entropy(model(batch[0]), batch[1], reduction="none")

    return names | {
        "make_model": make_model,
        "loss": loss,
        "make_optimizer": partial(torch.optim.Adam, lr=0.02),
        "learn_queries": setup.learn_queries,
        "eval_queries": setup.eval_queries,
    }


def language() -> dict[str, Any]:
    """my-gpt2, train.jsonl, learn.jsonl and eval.jsonl."""
    from hf_toy import tokenizer, write_jsonl
    from transformers import GPT2Config, GPT2LMHeadModel

    with torch.random.fork_rng():
        torch.manual_seed(0)
        sizes = {"n_positions": 512, "n_embd": 8, "n_layer": 2, "n_head": 2}
        model = GPT2LMHeadModel(GPT2Config(vocab_size=300, bos_token_id=0, eos_token_id=0, **sizes))
    model.save_pretrained("my-gpt2")
    tokenizer().save_pretrained("my-gpt2")
    write_jsonl(Path("train.jsonl"), LINES[:130])
    write_jsonl(Path("learn.jsonl"), LINES[130:136])
    write_jsonl(Path("eval.jsonl"), LINES[136:140])
    return {}


def talking() -> None:
    """my-gpt2 with a chat template."""
    from hf_toy import tokenizer

    language()
    words = tokenizer()
    words.chat_template = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
    words.save_pretrained("my-gpt2")


def conversations() -> dict[str, Any]:
    talking()
    Path("my-gpt2").rename("model")
    return {}


def chat() -> dict[str, Any]:
    """An adapter on my-gpt2, chats.jsonl and questions.jsonl."""
    from peft import LoraConfig, get_peft_model
    from transformers import GPT2LMHeadModel

    talking()
    base = GPT2LMHeadModel.from_pretrained(Path("my-gpt2").absolute())
    targets = LoraConfig(r=2, target_modules=["c_attn"], init_lora_weights=False, fan_in_fan_out=True)
    get_peft_model(base, targets).save_pretrained("adapter")

    def talk(line: str) -> dict[str, Any]:
        return {
            "messages": [{"role": "user", "content": line[:20]}, {"role": "assistant", "content": line[20:]}]
        }

    json_lines("chats.jsonl", [talk(line) for line in LINES[:130]])
    json_lines("questions.jsonl", [talk(line) for line in LINES[130:134]])
    return {}


def preferred() -> dict[str, Any]:
    """The same, and pairs.jsonl."""
    chat()
    keys = ("prompt", "chosen", "rejected")
    json_lines(
        "pairs.jsonl",
        [dict(zip(keys, (a[:12], a[12:], b[12:]))) for a, b in zip(LINES[:130], LINES[1:])],
    )
    return {}


def both() -> dict[str, Any]:
    return {**project(), **language()}


def weights() -> dict[str, Any]:
    """And an index of a language model, in runs/lm."""
    from shell import Command, run

    language()
    words = "unde build --hf-model my-gpt2 --data train.jsonl --method tracin --out runs/lm"
    run(Command(words.split()))
    given = indexed()
    draw = torch.Generator().manual_seed(0)
    sizes = {"masks": len(given["index"]), "utility": len(given["queries"][0])}
    bank = {name: torch.randn(8, size, generator=draw) for name, size in sizes.items()}
    return {**given, **bank, "masks": bank["masks"] > 0}


def stores() -> dict[str, Any]:
    """Also a way to retrain, for a bank."""
    given = indexed()
    x, _ = given["train_data"]

    def train(rows, seed):
        return x[rows].mean()

    def utility(model):
        return {"eval": torch.arange(5.0) * model}

    return {**given, "train": train, "utility": utility, "weights": given["index"].learn_weights()}


def denoiser() -> dict[str, Any]:
    from denoisers import ddpm
    from torch import nn

    class Denoiser(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 3, 3, padding=1)

        def forward(self, sample, timestep):
            return self.last(torch.tanh(self.first(sample)))

    images = torch.rand(40, 3, 8, 8, generator=torch.Generator().manual_seed(0)) * 2 - 1
    return {"unet": Denoiser().eval(), "scheduler": ddpm(), "images": images}


def pipeline() -> dict[str, Any]:
    import sd_toy

    Path("toy").mkdir()
    sd_toy.save(Path("toy")).rename("my-model")
    images = torch.rand(12, 3, 8, 8, generator=torch.Generator().manual_seed(0)) * 2 - 1
    return {"images": images, "prompts": ["a cat", "a dog"] * 6}


def cifar() -> dict[str, Any]:
    """cifar10.npz: real digits, blown up to 16 × 16 and in colour."""
    import numpy as np
    from sklearn.datasets import load_digits

    pixels, y = load_digits(return_X_y=True)
    x = np.kron(pixels.reshape(-1, 8, 8)[:, :, :, None] * 15, np.ones((1, 2, 2, 3))).astype("uint8")
    np.savez("cifar10.npz", x_train=x[:500], y_train=y[:500], x_test=x[500:620], y_test=y[500:620])
    return {}


def pictures() -> dict[str, Any]:
    import numpy as np

    pipeline()
    number = np.arange(60)
    words = [["a cat", "a dog"], ["a sketch", "a print"], ["a beach", "a forest"]]
    labels = {
        name: np.where(number % 3 == i, number // 3 % 2, -1)
        for i, name in enumerate(("subject", "style", "background"))
    }
    images = np.random.default_rng(0).integers(0, 255, (60, 3, 8, 8), "uint8")
    prompts = [words[i % 3][i // 3 % 2] for i in number]
    np.savez("pictures.npz", images=images, prompts=prompts, **labels)
    return {}


def changing() -> dict[str, Any]:
    """An index with ids, data that is new, and two indexes of parts."""
    import unde

    model, task = torch.nn.Linear(4, 3), unde.tasks.Classification()
    x = torch.randn(120, 4, generator=torch.Generator().manual_seed(0))
    y = torch.arange(120) % 3
    parts = {"idx": range(50), "monday": range(80, 100), "tuesday": range(100, 120)}
    for name, rows in parts.items():
        ids = [f"doc-{i}" for i in rows]
        unde.Index.build(model, task, (x[list(rows)], y[list(rows)]), f"runs/{name}", ids=ids)
    more = (x[50:60], y[50:60])
    given = {"model": model, "task": task, "data": (x[:50], y[:50]), "some_data": more, "unde": unde}
    return {**given, "more_data": more, "more_ids": [f"doc-{i}" for i in range(50, 60)]}


def choosing() -> dict[str, Any]:
    """An index of a pool of texts, targets, and a recorded training."""
    from shell import Command, run

    from unde.integrations.training import Recorder

    language()
    words = "unde build --hf-model my-gpt2 --data train.jsonl --method tracin --out runs/pool"
    run(Command(words.split()))
    for name, lines in (("questions", LINES[130:134]), ("law", LINES[134:136]), ("chat", LINES[136:])):
        json_lines(f"{name}.jsonl", [{"text": line} for line in lines])
    given = indexed()
    model, (x, y) = given["model"], given["train_data"]
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    with Recorder("runs/recorded", model, optimizer, every=1):
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    targets = {"law": tuple(c[:8] for c in given["queries"]), "chat": tuple(c[8:] for c in given["queries"])}
    return {**given, "pool": (x, y), **targets}


def removing() -> dict[str, Any]:
    from unde.setup import Recipe

    given = indexed()
    setup = Recipe("my_project.setup:make").make()
    return {**given, "setup": setup, "eval_queries": tuple(column[:1] for column in setup.eval_queries)}


def training() -> dict[str, Any]:
    """A model in training, and an index to share."""
    given = indexed()
    x, y = given["train_data"]
    optimizer = torch.optim.Adam(given["model"].parameters(), lr=1e-3)
    return {**given, "x": x, "y": y, "optimizer": optimizer}


def configs() -> dict[str, Any]:
    from transformers import AutoModelForCausalLM, GPT2Config

    import unde
    from unde.tasks import CausalLM

    both()
    config = GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=50)
    names = {"AutoModelForCausalLM": AutoModelForCausalLM, "CausalLM": CausalLM, "config": config}
    return {**names, "torch": torch, "unde": unde}


def json_lines(path: str, rows: list[dict[str, Any]]) -> None:
    Path(path).write_text("".join(json.dumps(row) + "\n" for row in rows))


WORLDS: dict[str, World] = {
    "README.md": World(
        both,
        {
            "calibrate(train, learn)": "calibrate(train, learn, halves=8)",
            ", calibration)": ", calibration, ks=[1], decays=[1])",
            "slice(0, 1500), slice(1500, 1650)": "slice(0, 600), slice(1500, 1540)",
            "range(1500)": "range(600)",
            "range(100)": "range(50)",
        },
    ),
    "docs/weights.md": World(weights),
    "docs/calibration.md": World(
        calibrated, {"--halves 16 --budget 2h": "--halves 4", "halves=8": "halves=4", "epochs=20": "epochs=2"}
    ),
    "docs/audit.md": World(indexed),
    "docs/leaks.md": World(weights),
    "docs/sources.md": World(indexed),
    "docs/banks.md": World(smaller={"subsets=64": "subsets=6", "epochs=20": "epochs=3"}),
    "docs/language-models.md": World(language),
    "docs/object-stores.md": World(stores, {"s3://bucket": "memory://docs", "n_train=1000": "n_train=20"}),
    "docs/diffusion.md": World(
        denoiser,
        {"(3, 32, 32)": "(3, 8, 8)", "range(200, 400)": "range(40, 50)", "range(200)": "range(40)",
         "timesteps=50": "timesteps=3", "consecutive(128)": "consecutive(2)"},
    ),
    "docs/stable-diffusion.md": World(pipeline, 
        {'.to("cuda")': "", "timesteps=50": "timesteps=2", "rank=128": "rank=2", "range(100)": "range(3)",
         "range(100, 110)": "range(4, 6)", "consecutive(128)": "consecutive(4)"},
    ),
    "docs/tutorials/wrong-labels.md": World(cifar, {"range(30)": "range(3)"}),
    "docs/tutorials/language-model.md": World(language),
    "docs/tutorials/cluster.md": World(),
    "docs/changing-indexes.md": World(changing),
    "docs/data.md": World(conversations),
    "docs/tutorials/chat-lora.md": World(chat),
    "docs/trl.md": World(preferred),
    "docs/tutorials/diffusion.md": World(
        pictures, {"timesteps=20": "timesteps=2", "rank=16": "rank=2", "range(50)": "range(6)"}
    ),
    "docs/plan.md": World(configs, {"DIR_OR_FILE": "my-gpt2"}),
    "docs/reliability.md": World(indexed),
    "docs/scale.md": World(project),
    "docs/select.md": World(choosing),
    "docs/counterfactual.md": World(
        removing, {"--k 10 --k 50 --first 5": "--k 10 --first 1", "ks=[10, 50]": "ks=[50]"}
    ),
    "docs/while-training.md": World(
        training, {"s3://bucket": "memory://card", "range(300)": "range(4)", "every=100):": "every=2):",
                   '"runs/idx", method="tracin", **record': '"runs/new", method="tracin", **record'}
    ),
    "docs/exact.md": World(project),
}  # fmt: skip
