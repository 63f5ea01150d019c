"""WikiText-103 and Llama on OpenWebText end to end, on a few sentences."""

from dataclasses import replace

import numpy as np
import pytest
import scale_toy
import torch

import hf_toy  # isort: skip  (its folder is put on the path by scale_toy)
from experiments.scale.language import OpenWebText, WikiText, continued
from experiments.scale.settings import LLAMA_OWT, WIKITEXT103
from experiments.scale.sources import sequences

from refusals import refused
from unde import UndeError

CONFIG = {
    "vocab_size": 300, "n_positions": 16, "n_embd": 8, "n_layer": 1, "n_head": 2, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
    "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
TINY = replace(
    WIKITEXT103, config=CONFIG, length=8, train=20, learn=4, evaluate=5, subsets=16, patch=3, projection="kron(4)",
    logra="kron(6)", recipe=replace(WIKITEXT103.recipe, epochs=1, batch_size=8),
)  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    hf_toy.tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def folder(tmp_path):
    lines = hf_toy.LINES
    splits = {"train": ["", *lines[:5]], "validation": ["", *lines[5:7]], "test": [lines[7], lines[7]]}
    return scale_toy.tables(tmp_path / "wiki", splits)


def test_lds_and_tail_patch_end_to_end(tmp_path, folder, tokenizer, monkeypatch):
    study = WikiText(TINY, scale_toy.place(tmp_path, folder, model=tokenizer))
    found = scale_toy.results(study.run_lds())
    assert found.pop("bank")["subsets"] == 16
    assert set(found) == {"TracIn", "TRAK", "LoGRA", "EKFAC"}
    for entry in found.values():
        scale_toy.check_lds(entry)
        assert len(entry["groups"]) == 4  # the four matrices of the block, nothing else
    used = {title: entry["methods"][0] for title, entry in found.items()}
    assert "kron(4)" in used["TRAK"] and "kron(6)" in used["EKFAC"]

    found = scale_toy.results(study.run_patches())
    random = found["random"]
    assert random["k"] == 3 and set(random["per_token"]) == scale_toy.ESTIMATE
    assert set(found) == {"random", "TracIn", "TRAK", "LoGRA", "EKFAC"}
    for title in ("TracIn", "TRAK", "LoGRA", "EKFAC"):
        scale_toy.check_patch(found[title])

    def refuse(*_, **__):
        raise AssertionError("patched again")

    monkeypatch.setattr("experiments.scale.language.tail_patch", refuse)
    again = WikiText(TINY, study.place)
    assert scale_toy.results(again.run_patches()) == found


def test_texts_are_joined_and_cut(tmp_path, folder, tokenizer):
    study = WikiText(TINY, scale_toy.place(tmp_path, folder, model=tokenizer))
    tokens = study.train().rows(range(20))
    assert tokens.shape == (20, 8)
    text = hf_toy.tokenizer().decode(tokens.flatten().tolist())
    assert "".join(hf_toy.LINES[:5]).startswith(text)


def test_what_is_missing_is_said(tmp_path, folder, tokenizer):
    refused(
        "no tokenizer in None: give --model FOLDER", WikiText(TINY, scale_toy.place(tmp_path, folder)).train
    )
    with pytest.raises(
        UndeError, match=r"no tokenizer in .*wiki: give --model FOLDER with GPT-2's tokenizer"
    ):
        WikiText(TINY, scale_toy.place(tmp_path, folder, model=folder)).train()
    small = replace(TINY, config={**CONFIG, "vocab_size": 100})
    with pytest.raises(UndeError, match="300 tokens, the model 100"):
        WikiText(small, scale_toy.place(tmp_path, folder, model=tokenizer)).train()


LLAMA = replace(
    LLAMA_OWT, length=12, train=20, entries=8, learn=4, evaluate=5, snippet=4, projection="kron(4)", lr=1e-3
)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("llama")
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1, "max_position_embeddings": 32}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    LlamaForCausalLM(LlamaConfig(vocab_size=300, **sizes, **heads)).save_pretrained(folder)
    hf_toy.tokenizer().save_pretrained(folder)
    return folder


def test_llama_tail_patch_end_to_end(tmp_path, llama, monkeypatch):
    folder = scale_toy.tables(tmp_path / "owt", {"train": hf_toy.LINES})
    study = OpenWebText(LLAMA, scale_toy.place(tmp_path, folder, model=llama))
    found = scale_toy.results(study.run_patches())
    assert found.pop("random")["k"] == 1 and set(found) == {"TracIn", "LoGRA"}
    for title, entry in found.items():
        assert set(entry["own snippet is top-1"]) == {"unweighted", "weighted"}
        scale_toy.check_patch(entry)
        assert len(study.learn_scores(title).groups) == 7  # matrices of one block
    queries = study.queries("eval")
    assert queries["input_ids"].shape == (5, 12)
    assert (queries["labels"][:, :4] == -100).all() and (queries["labels"][:, 4:] >= 0).all()
    sources = study._generated["eval sources"]
    assert torch.equal(queries["input_ids"][:, :4], study.train().rows(sources)[:, :4])
    assert not set(sources.tolist()) & set(study._generated["learn sources"].tolist())


def test_continuations_follow_the_model(llama):
    """With keys and values of past tokens kept, the same tokens as without."""
    from transformers import AutoModelForCausalLM

    model, prompts = AutoModelForCausalLM.from_pretrained(llama).eval(), torch.tensor([[5, 6, 7], [8, 9, 10]])
    made = continued(model, prompts, 8, seed=3, rows=2, title="")
    draw, tokens = torch.Generator().manual_seed(3), prompts
    with torch.no_grad():
        while tokens.shape[1] < 8:
            chances = model(input_ids=tokens, use_cache=False).logits[:, -1].softmax(-1)
            tokens = torch.cat([tokens, torch.multinomial(chances, 1, generator=draw)], 1)
    np.testing.assert_array_equal(made, tokens)


def test_llama_needs_its_folder(tmp_path):
    folder = scale_toy.tables(tmp_path / "owt", {"train": hf_toy.LINES})
    with pytest.raises(UndeError, match="--model FOLDER with Llama-3-8B-Instruct"):
        OpenWebText(LLAMA, scale_toy.place(tmp_path, folder)).run_patches()


def test_what_is_left_over_goes_into_the_next_block(tmp_path):
    lines = hf_toy.LINES
    whole = sequences(tmp_path / "a", [lines], hf_toy.tokenizer(), 7, 25, "lines").rows(range(25))
    parts = sequences(tmp_path / "b", [[line] for line in lines], hf_toy.tokenizer(), 7, 25, "lines")
    np.testing.assert_array_equal(parts.rows(range(25)), whole)
