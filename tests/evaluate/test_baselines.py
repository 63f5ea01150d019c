import math
import re
import sys

import numpy as np
import pytest
import torch
from sklearn.metrics.pairwise import euclidean_distances
from torch import nn

import models
from refusals import refused
from unde.errors import UndeError
from unde.evaluate import (
    bm25,
    random_indices,
    representation_distance,
    representation_similarity,
)
from unde.tasks import CausalLM, Classification, Task

CORPUS = [
    "The cat sat on the mat, the other cat sat too.",
    "A dog in the fog",
    "",
    "Cats and dogs; a dog, a DOG!",
    "naïve 2nd_hand x y z",
]


def test_random_positions():
    drawn = random_indices(50, 400, 20, seed=3)
    assert drawn.dtype == np.int64 and drawn.min() == 0 and drawn.max() == 49
    assert all(len(set(row)) == 20 for row in drawn.tolist())
    counts = np.bincount(drawn.ravel(), minlength=50)  # each is drawn 160 times, ± 9.8
    assert np.abs(counts - 160).max() < 5 * 9.8
    assert np.array_equal(drawn, random_indices(50, 400, 20, seed=3))
    assert np.array_equal(drawn[:7, :5], random_indices(50, 7, 5, seed=3))
    assert not np.array_equal(drawn, random_indices(50, 400, 20, seed=4))
    assert sorted(random_indices(5, 1, 5, seed=0)[0]) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("arguments", "message"), [((5, 2, 6), "k is 6: expected 1 to 5"), ((5, 0, 2), "queries is 0")]
)
def test_bad_random_positions(arguments, message):
    refused(message, random_indices, *arguments, seed=0)


def formula(corpus, query, k1=1.5, b=0.75):
    """Σ over the words of the query of idf(w) · tf / (tf + k1 (1 − b + b |d| / mean |d|))."""
    documents = [re.findall(r"\w\w+", text.lower()) for text in corpus]
    mean = sum(map(len, documents)) / len(documents)
    scores = np.zeros(len(documents))
    for word in re.findall(r"\w\w+", query.lower()):
        holding = sum(word in d for d in documents)
        idf = math.log(1 + (len(documents) - holding + 0.5) / (holding + 0.5))
        for i, d in enumerate(documents):
            tf = d.count(word)
            scores[i] += idf * tf / (tf + k1 * (1 - b + b * len(d) / mean))
    return scores


def test_bm25_is_the_formula():
    queries = ["the dog", "cat cat mat", "2ND_hand naïve", "zebra", "", "a y", "The and THE"]
    scores = bm25(CORPUS, iter(queries))
    assert scores.dtype == torch.float32
    np.testing.assert_allclose(scores, [formula(CORPUS, q) for q in queries], rtol=1e-5, atol=0)
    assert scores[0, 1] > 0 and scores[6, 0] > 0  # "the" and "and" are words like others
    assert not scores[3:6].any()


def test_bm25_is_quiet(capfd):
    bm25(CORPUS, CORPUS)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("train", "queries", "message"),
    [
        ("a single text", ["x"], "train_texts is a single string: expected a list of strings"),
        (["text"], [], "query_texts is empty"),
        (["text", None], ["x"], "train_texts is not all text: number 1 is a NoneType"),
        (["a b", "!"], ["text"], "no training text has a word"),
    ],
)
def test_bm25_bad_input(train, queries, message):
    refused(message, bm25, train, queries)


def test_bm25_without_its_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "bm25s", None)
    refused(r"pip install 'unde\[hf\]'", bm25, ["text"], ["text"])


def similarity(model, train, queries, layer, **options):
    return representation_similarity(model, Classification(), train, queries, layer=layer, **options)


def between(a, b, metric):
    """Of two vectors."""
    a, b = a.double().numpy(), b.double().numpy()
    return -np.linalg.norm(a - b) if metric == "l2" else a @ b / np.linalg.norm(a) / np.linalg.norm(b)


def table(queries, train, metric):
    return [[between(a, b, metric) for b in train] for a in queries]


@pytest.mark.parametrize("metric", ["cosine", "l2"])
@pytest.mark.parametrize("layer", ["transformer.h.0", "transformer", "transformer.ln_f"])
def test_hidden_states_of_gpt2(metric, layer):
    """Padded batches against one sequence at a time; `transformer` returns an output with several entries."""
    torch.manual_seed(0)
    model = models.gpt2().eval()
    data = [{"input_ids": torch.randint(23, (n,))} for n in (3, 9, 5, 4, 7)]
    with torch.no_grad():
        runs = [model(e["input_ids"][None], output_hidden_states=True).hidden_states for e in data]
    # The last of transformers' hidden states is what the final norm gives, the second what block 0 gives.
    states = [run[1 if layer == "transformer.h.0" else -1][0].mean(0) for run in runs]
    scores = representation_similarity(
        model, CausalLM(), data, data[3:], layer=layer, metric=metric, batch_size=3
    )
    np.testing.assert_allclose(scores, table(states[3:], states, metric), rtol=1e-5, atol=2e-6)
    # without a collate of their own
    loaders = [torch.utils.data.DataLoader(part) for part in (data, data[3:])]
    again = representation_similarity(model, CausalLM(), *loaders, layer=layer, metric=metric, batch_size=3)
    assert torch.equal(again, scores)


@pytest.mark.parametrize("metric", ["cosine", "l2"])
def test_feature_maps_are_averaged_over_space_and_vectors_are_taken_as_they_are(metric):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 6, 3), nn.ReLU(), nn.Flatten(), nn.Linear(54, 4))
    x, y = torch.randn(9, 2, 5, 5), torch.zeros(9, dtype=torch.long)
    with torch.no_grad():
        maps, vectors = model[:2](x).mean((2, 3)), model(x)
    for layer, states in (("1", maps), ("3", vectors)):
        scores = similarity(model, (x, y), (x[:4], y[:4]), layer, metric=metric, batch_size=4)
        np.testing.assert_allclose(scores, table(states[:4], states, metric), rtol=1e-5, atol=1e-6)
        assert (scores.argmax(1) == torch.arange(4)).all()  # higher is closer: each is nearest to itself


def test_small_distances_are_exact():
    x, y = torch.full((40, 30), 100.0), torch.zeros(40, dtype=torch.long)
    x[:, 0] += torch.arange(40) * 1e-3
    scores = similarity(nn.Sequential(nn.Identity(), nn.Linear(30, 2)), (x, y), (x, y), "0", metric="l2")
    np.testing.assert_allclose(scores, table(x, x, "l2"), rtol=1e-6)


class Tupled(nn.Module):
    def forward(self, x):
        return {"state": x, "other": None}


def test_the_first_of_several_outputs_and_the_last_of_several_calls():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Tupled()

        def forward(self, x):
            self.inner(x.flip(0))
            return self.inner(x)["state"]

    x, y = torch.randn(4, 3), torch.zeros(4, dtype=torch.long)
    scores = similarity(Twice(), (x, y), (x, y), "inner")
    np.testing.assert_allclose(scores, table(x, x, "cosine"), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("fails", [False, True])
def test_the_model_is_left_as_it_was(fails):
    class Failing(Classification):
        def loss(self, model, batch):
            torch.rand(1)
            loss = super().loss(model, batch)
            if fails and len(batch[0]) == 3:
                raise RuntimeError("on purpose")
            return loss

    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2))
    x, y = torch.randn(7, 3), torch.zeros(7, dtype=torch.long)
    model(x).sum().backward()
    before = [p.grad for p in model.parameters()]
    buffers, state = [b.clone() for b in model.buffers()], torch.get_rng_state()
    arguments = (model, Failing(), (x, y), (x[:4], y[:4]))
    if fails:
        with pytest.raises(RuntimeError, match="on purpose"):
            representation_similarity(*arguments, layer="2", batch_size=4)
    else:
        scores = representation_similarity(*arguments, layer="2", batch_size=4)
        with torch.no_grad():
            states = model.eval()[:3](x)
        model.train()
        np.testing.assert_allclose(scores, table(states[:4], states, "cosine"), rtol=1e-5, atol=1e-6)
        assert not scores.requires_grad
    assert all(m.training for m in model.modules())
    assert not any(m._forward_hooks for m in model.modules())
    assert all(p.requires_grad and p.grad is g for p, g in zip(model.parameters(), before))
    assert all(map(torch.equal, model.buffers(), buffers)) and torch.equal(torch.get_rng_state(), state)


class TimeFirst(nn.Module):
    """(B, d) → (d, B, 1) inside."""

    def __init__(self):
        super().__init__()
        self.turned, self.spare, self.text = nn.Identity(), nn.Identity(), Worded()

    def forward(self, x):
        self.text(x)
        return self.turned(x.T[:, :, None])[:, :, 0].T


class Worded(nn.Module):
    def forward(self, x):
        return "text"


@pytest.mark.parametrize(
    ("layer", "options", "message"),
    [
        (
            "turnd",
            {},
            r"unknown layer 'turnd': expected one of 'turned', 'spare', 'text'. Did you mean 'turned'\?",
        ),
        ("", {}, "unknown layer ''"),
        ("turned", {}, r"'turned' gives shape \(3, 5, 1\) for 5 examples: .* the examples first"),
        ("spare", {}, "'spare' takes no part in the loss"),
        ("text", {}, "'text' gives a str: expected a tensor"),
        ("turned", {"metric": "dot"}, "unknown metric 'dot': expected one of 'cosine', 'l2'"),
        ("turned", {"batch_size": 0}, "batch_size is 0"),
    ],
)
def test_bad_layers(layer, options, message):
    x, y = torch.randn(5, 3), torch.zeros(5, dtype=torch.long)
    refused(message, similarity, TimeFirst(), (x, y), (x, y), layer, **options)


def test_only_near_names_are_listed_of_a_large_model():
    data = [{"input_ids": torch.arange(4)}]
    with pytest.raises(
        UndeError, match=r"'transformer\.h\.1'.* Did you mean 'transformer\.h\.\d'\?"
    ) as error:
        representation_similarity(models.gpt2(), CausalLM(), data, data, layer="transformer.h.7")
    assert len(str(error.value)) < 500


def test_a_mask_of_another_length_is_refused():
    class Shortened(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.body = nn.Embedding(9, 4), nn.Identity()

        def forward(self, input_ids, attention_mask):
            return self.body(self.embed(input_ids)[:, ::2])

    class Size(Task):
        def loss(self, model, batch):
            return model(**batch).sum((1, 2))

    data = {"input_ids": torch.ones(3, 6).long(), "attention_mask": torch.ones(3, 6).long()}
    with pytest.raises(UndeError, match=r"\(3, 3, 4\), but attention_mask has shape \(3, 6\)"):
        representation_similarity(Shortened(), Size(), data, data, layer="body")


def test_distances_are_those_of_scikit_learn():
    """A convolutional module, batch by batch, against all its features at once."""
    torch.manual_seed(0)
    encoder = nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.Dropout(0.5))
    train, queries = torch.randn(11, 3, 5, 5), torch.randn(4, 3, 5, 5)
    scores = representation_distance(encoder, train, queries, batch_size=3)
    assert encoder.training and all(p.requires_grad for p in encoder.parameters())
    encoder.eval()
    with torch.no_grad():
        features = [encoder(x).mean((2, 3)).double().numpy() for x in (queries, train)]
    np.testing.assert_allclose(scores, -euclidean_distances(*features), rtol=1e-5, atol=1e-6)


def test_distances_of_a_function_and_of_an_encoder_of_transformers():
    """The spatial mean of the last feature map, which comes first, is what the pooler gives."""
    from transformers import ResNetConfig, ResNetModel

    torch.manual_seed(0)
    config = ResNetConfig(embedding_size=4, hidden_sizes=[4, 8], depths=[1, 1], layer_type="basic")
    model = ResNetModel(config).eval()
    images = torch.randn(6, 3, 16, 16)
    with torch.no_grad():
        pooled = model(images).pooler_output.flatten(1)
    expected = -euclidean_distances(pooled.double().numpy())
    found = representation_distance(model, images, images, batch_size=4)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    labelled = [{"image": image, "label": 0} for image in images]

    def pooler(batch):
        return model(batch["image"]).pooler_output.flatten(1)

    found = representation_distance(pooler, labelled, labelled, batch_size=4)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    assert not found.requires_grad


@pytest.mark.parametrize(
    ("encoder", "options", "message"),
    [
        (None, {}, "encoder is a NoneType: expected a module, or a function"),
        (lambda x: "text", {}, "the encoder gives a str: expected a tensor"),
        (lambda x: x.mean(), {}, r"the encoder gives shape \(\) for 4 examples"),
        (lambda x: x.T, {}, r"the encoder gives shape \(3, 4\) for 4 examples"),
        (lambda x: x[:, : 1 + len(x) % 2], {}, "features have 1 numbers for queries and 2 for training"),
        (lambda x: x, {"batch_size": 0}, "batch_size is 0"),
    ],
)
def test_bad_encoders(encoder, options, message):
    refused(message, representation_distance, encoder, torch.randn(5, 3), torch.randn(4, 3), **options)
