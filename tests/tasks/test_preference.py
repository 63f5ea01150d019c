"""Pairs of answers: DPO and reward models against plain loops over single examples, and against autograd."""

import numpy as np
import torch
import torch.nn.functional as F
from transformers import GPT2Config, GPT2LMHeadModel

from cases import randomized
from refusals import refused
from unde import Index
from unde.methods import EKFAC, TracIn
from unde.tasks import CausalLM, Preference, Reward
from zoo import encoder


def ids(length, seed):
    return torch.randint(3, 23, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def pairs(count=5):
    """Of different lengths, two of them as long as each other."""
    return [
        {
            "prompt_ids": ids(2 + i % 2, i),
            "chosen_ids": ids(3 + i % 3, 10 + i),
            "rejected_ids": ids(3 + i % 2, 20 + i),
            "ref_chosen_logps": -9.0 - i,
            "ref_rejected_logps": -8.0 + i,
            "prompt": "columns of texts are left out",
        }
        for i in range(count)
    ]


def language_model():
    sizes = {"vocab_size": 40, "n_positions": 12, "n_embd": 8, "n_layer": 1, "n_head": 2}
    torch.manual_seed(0)
    return randomized(GPT2LMHeadModel(GPT2Config(**sizes))).eval()


def reward_model():
    torch.manual_seed(0)
    return randomized(encoder("Bert", "SequenceClassification", num_labels=1)()).eval()


def log_p(model, pair, side):
    """log p(answer | prompt), token by token."""
    prompt, answer = pair["prompt_ids"], pair[f"{side}_ids"]
    logits = model(torch.tensor([prompt + answer])).logits[0].log_softmax(-1)
    return sum(logits[len(prompt) + i - 1, token] for i, token in enumerate(answer))


def dpo(model, pair, beta):
    ratios = [log_p(model, pair, side) - pair[f"ref_{side}_logps"] for side in ("chosen", "rejected")]
    return -F.logsigmoid(beta * (ratios[0] - ratios[1]))


def gradient(model, loss):
    model.zero_grad()
    loss.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def test_losses_and_gradients_of_preferences_are_those_of_a_loop(tmp_path):
    model, data, task = language_model(), pairs(), Preference(beta=0.3)
    losses = [dpo(model, pair, 0.3) for pair in data]
    torch.testing.assert_close(task.loss(model, task.collate(data)), torch.stack(losses))
    index = Index.build(model, task, data, tmp_path / "idx", method=TracIn(projection="none"), progress=False)
    wanted = torch.stack([gradient(model, loss) for loss in losses])
    torch.testing.assert_close(index.score(data).total(), wanted @ wanted.T, rtol=1e-4, atol=1e-3)
    assert index.manifest.task["settings"] == {"beta": 0.3}


def test_a_text_is_asked_which_pairs_made_the_model_say_it(tmp_path):
    model, data, task = language_model(), pairs(), Preference(beta=0.3)
    index = Index.build(model, task, data, tmp_path / "idx", method=TracIn(projection="none"), progress=False)
    text = {"input_ids": torch.tensor(ids(6, 30)), "labels": torch.tensor([-100, -100, *ids(6, 30)[2:]])}
    ours = index.score([text]).total()[0]
    plain = gradient(model, CausalLM("sum").loss(model, CausalLM().collate([text])).sum())
    wanted = torch.stack([gradient(model, dpo(model, pair, 0.3)) for pair in data])
    torch.testing.assert_close(ours, wanted @ plain, rtol=1e-4, atol=1e-3)


def test_tokens_of_both_answers_add_up_to_the_score(tmp_path):
    model, data, task = language_model(), pairs(), Preference(beta=0.3)
    index = Index.build(model, task, data, tmp_path / "idx", method=EKFAC(projection="none"), progress=False)
    scores = index.score(data[:2])
    for q in range(2):
        parts = index.tokens(scores)(q, data[3])
        lengths = [
            len(data[3]["prompt_ids"]) + len(data[3][f"{side}_ids"]) for side in ("chosen", "rejected")
        ]
        assert len(parts) == sum(lengths)
        assert parts[: len(data[3]["prompt_ids"])].abs().max() == 0  # a prompt has no loss
        torch.testing.assert_close(float(parts.sum()), float(scores.total()[q, 3]), rtol=1e-3, atol=1e-6)


def test_rewards_are_those_of_a_loop(tmp_path):
    model, task = reward_model(), Reward()
    data = [
        {"chosen_ids": ids(4 + i % 2, i), "rejected_ids": ids(3 + i % 3, 9 + i), "margin": 0.1 * i}
        for i in range(5)
    ]

    def loss(pair):
        better, worse = (model(torch.tensor([pair[k]])).logits[0, 0] for k in ("chosen_ids", "rejected_ids"))
        return -F.logsigmoid(better - worse - pair["margin"])

    losses = [loss(pair) for pair in data]
    torch.testing.assert_close(task.loss(model, task.collate(data)), torch.stack(losses))
    index = Index.build(model, task, data, tmp_path / "idx", method=TracIn(projection="none"), progress=False)
    wanted = torch.stack([gradient(model, loss) for loss in losses])
    torch.testing.assert_close(index.score(data).total(), wanted @ wanted.T, rtol=1e-4, atol=1e-4)


def test_the_true_fisher_matrix_is_that_of_the_choice_between_two():
    """Σ over labels of ∇v ∇vᵀ is p(1 − p) ∇m ∇mᵀ, of the margin m."""
    model, task = language_model(), Preference(beta=0.3)
    batch = task.collate(pairs(1))
    margin = task.margin(model, batch)
    p = torch.sigmoid(margin).item()
    wanted = gradient(model, margin.sum())
    terms = [gradient(model, task.measure(model, batch, name=f"true {y}").sum()) for y in range(2)]
    squares = sum(t.square() for t in terms)
    torch.testing.assert_close(squares, p * (1 - p) * wanted.square(), rtol=1e-3, atol=1e-5)


def test_perturbed_pairs_keep_their_shape():
    [replace] = Preference().perturbations(language_model(), pairs())
    pair = pairs(1)[0]
    changed = replace(pair, 0.9, np.random.default_rng(0))
    assert [len(changed[k]) for k in ("prompt_ids", "chosen_ids")] == [2, 3]
    assert changed["ref_chosen_logps"] == pair["ref_chosen_logps"] and changed != pair


def test_what_is_missing_is_said():
    bare = {k: v for k, v in pairs(1)[0].items() if not k.startswith("ref")}
    refused("precompute_ref_log_probs=True.*add_reference", Preference().collate, [bare])
    refused("'prompt_ids'.*chosen_ids", Preference().collate, [{"text": "x"}])
    refused("beta is 0.*0.1", Preference, beta=0)
    refused("num_labels=1", Reward().loss, language_model(), Reward().collate(pairs(1)))
