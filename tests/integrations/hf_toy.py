"""A GPT-2 so small that every test can afford its own, and a byte-level tokenizer trained on a few lines."""

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

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
    config = GPT2Config(
        vocab_size=vocabulary,
        n_positions=CONTEXT,
        n_embd=8,
        n_layer=1,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
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
