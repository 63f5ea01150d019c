"""Contributions of tokens: they add up to the score, and each is the score of its own token's gradient."""

import pytest
import torch
from torch import nn

import toy
from unde import Index, UndeError
from unde.index import token_scores as module
from unde.methods import EKFAC, TRAK, TracIn
from unde.tasks import CausalLM

transformers = pytest.importorskip("transformers")


def gpt2(attention="sdpa"):
    torch.manual_seed(0)
    sizes = {"vocab_size": 40, "n_positions": 12, "n_embd": 8, "n_layer": 1, "n_head": 2}
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(**sizes, attn_implementation=attention)
    ).eval()


def llama():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=40, hidden_size=8, intermediate_size=12, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=12,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


def sentences(n, seed=0):
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, 12, (n,), generator=g).tolist()
    return [{"input_ids": torch.randint(40, (length,), generator=g)} for length in lengths]


TRAIN, QUERIES = sentences(9), sentences(3, seed=1)
METHODS = [
    TracIn(projection="none"),
    TracIn(projection="kron(3)", cosine=True),
    TracIn(projection="sjlt(16)"),
    TRAK(projection="kron(3)"),  # 9 examples: the dual form
    TRAK(projection="kron(1)", form="primal"),
    EKFAC(projection="kron(3)"),
]


def built(folder, method, model=None, task=None, **options):
    options = {"method": method, "batch_size": 4, "progress": False} | options
    return Index.build(model or gpt2(), task or CausalLM(), TRAIN, folder / "i", **options)


@pytest.mark.parametrize("method", METHODS, ids=str)
@pytest.mark.parametrize("weighted", [False, True])
def test_tokens_add_up_to_the_score(tmp_path, method, weighted):
    index = built(tmp_path, method)
    scores = index.score(QUERIES)
    w = torch.rand(len(scores.groups), generator=torch.Generator().manual_seed(0)) if weighted else None
    tokens, total = index.tokens(scores, w), scores.total(w)
    size = float(total.abs().max())
    for q in range(3):
        for n in (0, 5):
            parts = tokens(q, TRAIN[n])
            assert parts.shape == TRAIN[n]["input_ids"].shape
            assert parts[0] == 0  # nothing predicts the first token
            assert float(parts.sum()) == pytest.approx(float(total[q, n]), rel=2e-3, abs=1e-5 * size)


@pytest.mark.parametrize("make", [gpt2, lambda: gpt2("eager"), llama])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_each_part_is_the_product_with_its_own_gradient(tmp_path, make, reduction):
    model, task = make(), CausalLM(reduction)
    index = built(tmp_path, TracIn(projection="none"), model, task)
    scores = index.score(QUERIES)
    parts = index.tokens(scores)(1, TRAIN[4])
    parameters = list(model.parameters())
    q = torch.autograd.grad(task.loss(model, task.collate([QUERIES[1]])).sum(), parameters)
    losses = task.token_losses(model, task.collate([TRAIN[4]]))[0]
    for t in range(1, len(losses)):
        g = torch.autograd.grad(losses[t], parameters, retain_graph=True)
        want = sum((a * b).sum() for a, b in zip(q, g))
        assert float(parts[t]) == pytest.approx(float(want), rel=1e-3, abs=1e-6)


def test_without_forward_mode_the_same_numbers(tmp_path, monkeypatch):
    index = built(tmp_path, TracIn(projection="kron(3)"))
    tokens = index.tokens(index.score(QUERIES))
    want = tokens(0, TRAIN[2])

    def unsupported(*_a, **_k):
        raise NotImplementedError("no forward mode")

    monkeypatch.setattr(module, "jvp", unsupported)
    torch.testing.assert_close(tokens(0, TRAIN[2]), want, rtol=1e-3, atol=1e-6)


def test_several_checkpoints(tmp_path):
    states = [gpt2().state_dict(), {k: 0.9 * v for k, v in gpt2().state_dict().items()}]
    options = {"checkpoints": states, "checkpoint_weights": [1.0, 0.3]}
    index = built(tmp_path, TracIn(projection="kron(3)"), **options)
    scores = index.score(QUERIES)
    parts = index.tokens(scores)(2, TRAIN[3])
    assert float(parts.sum()) == pytest.approx(float(scores.total()[2, 3]), rel=1e-3)


def test_tasks_without_tokens_are_refused(tmp_path):
    index = toy.build(tmp_path / "i")
    with pytest.raises(UndeError, match="Classification defines no token_losses"):
        index.tokens(index.score(toy.data(2, seed=3)))
    assert isinstance(index.model, nn.Module)
