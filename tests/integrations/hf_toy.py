"""A GPT-2 so small that every test can afford its own, and a byte-level tokenizer trained on a few lines."""

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from unde import Index, Setup
from unde.methods import TracIn
from unde.tasks import CausalLM

CONTEXT = 64
LINES = [
    "The state of the union is strong, and the people are free.",
    "We ask the Congress for peace, for trade and for honest money.",
    "The harvest was good; the mines and the mills are busy again.",
    "Our navy guards the coast, our army the frontier of the west.",
    "Schools and roads are built where there was only forest before.",
    "The debt is paid in part, and taxes may soon be lowered.",
    "A treaty with the nations of the north was signed in spring.",
    "Railroads carry the grain of the plains to every port we have.",
]


def tokenizer(vocabulary: int = 300) -> PreTrainedTokenizerFast:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(LINES, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|endoftext|>")


def gpt2(vocabulary: int = 300, seed: int = 0) -> GPT2LMHeadModel:
    sizes = {"vocab_size": vocabulary, "n_positions": CONTEXT, "n_embd": 8, "n_layer": 1, "n_head": 2}
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    config = GPT2Config(**sizes, **dropout, bos_token_id=0, eos_token_id=0)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return GPT2LMHeadModel(config)


def save(folder: Path) -> Path:
    gpt2().save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def write_jsonl(path: Path, texts: list[str], field: str = "text") -> Path:
    path.write_text("".join(json.dumps({field: text}) + "\n" for text in texts))
    return path


def index_of(setup: Setup, folder: Path, **options) -> Index:
    """Its features are the gradients themselves."""
    options = {"method": TracIn(projection="none"), "progress": False} | options
    return Index.build(setup.model, setup.task, setup.train_data, folder, **options)


def gradient(ids, labels=None, state=None) -> torch.Tensor:
    """Of the model's own loss on one sequence, without unde; `state` replaces its parameters."""
    model, ids = gpt2(), torch.as_tensor(ids)[None]
    if state is not None:
        model.load_state_dict(state, strict=False)
    labels = ids if labels is None else torch.as_tensor(labels)[None]
    model(input_ids=ids, labels=labels).loss.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def sequences(texts: list[str]) -> list[dict[str, torch.Tensor]]:
    words = tokenizer()
    return [{"input_ids": torch.tensor(words(text)["input_ids"])} for text in texts]


def train(folder: Path, data, *callbacks, model=None, resume=None, **options):
    """A finished run of transformers' Trainer; its checkpoints are in `folder`."""
    from transformers import Trainer, TrainingArguments

    def collate(examples):
        return CausalLM().collate([{**e, "labels": e["input_ids"]} for e in examples])

    arguments = TrainingArguments(str(folder), report_to=[], use_cpu=True, disable_tqdm=True, **options)
    model = gpt2() if model is None else model
    trainer = Trainer(model, arguments, train_dataset=data, data_collator=collate, callbacks=list(callbacks))
    trainer.train(resume_from_checkpoint=resume)
    return trainer
