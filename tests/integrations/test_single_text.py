"""An index of one single text, and queries that have no loss."""

import pytest
import torch
from hf_toy import LINES, gpt2, tokenizer

from unde import Index, UndeError
from unde.integrations.language import hf_setup
from unde.methods import TracIn


def test_one_text_is_enough(tmp_path):
    """Positions, which all examples of a batch share, look like one example's own if there is only one."""
    setup = hf_setup(gpt2(), LINES[:1], tokenizer=tokenizer(), eval_queries=LINES[1:3])
    method = TracIn(projection="none")
    index = Index.build(
        setup.model, setup.task, setup.train_data, tmp_path / "i", method=method, progress=False
    )

    def gradient(example):
        model, ids = gpt2(), example["input_ids"][None]
        model(input_ids=ids, labels=ids).loss.backward()
        return torch.cat([p.grad.flatten() for p in model.parameters()])

    own = gradient(setup.train_data[0])
    expected = torch.stack([gradient(q) @ own for q in setup.eval_queries])
    torch.testing.assert_close(index.score(setup.eval_queries).total()[:, 0], expected, rtol=1e-4, atol=1e-6)


def test_a_query_without_a_loss_is_named(tmp_path):
    setup = hf_setup(gpt2(), LINES[:2], tokenizer=tokenizer())
    index = Index.build(
        setup.model, setup.task, setup.train_data, tmp_path / "i", method="tracin", progress=False
    )
    asked = [{"input_ids": e["input_ids"], "labels": e["input_ids"].clone()} for e in setup.train_data]
    asked[1]["labels"][:] = -100
    with pytest.raises(UndeError, match=r"^query 1 has no target, so no loss"):
        index.score(asked)
