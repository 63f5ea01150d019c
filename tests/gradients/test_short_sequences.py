"""Ways are chosen on examples cut short and confirmed on whole ones: what only whole ones show is still found."""

import pytest
import torch
from torch import nn

from oracles import assert_features, check, plan, slow_gradients
from unde import Index, UndeError
from unde.data import Rows
from unde.gradients import make_units
from unde.index.state import probe_path
from unde.methods import TracIn
from unde.store.shards import read_shard
from unde.tasks import CausalLM
from unde.tasks.tokens import IGNORE, SHORT

LONG, VOCABULARY = 41, 11


class Reads(nn.Module):
    """A language model that looks back by a running mean; `long` names what it does to texts longer than short ones."""

    def __init__(self, long=""):
        super().__init__()
        torch.manual_seed(0)
        self.words, self.mix = nn.Embedding(VOCABULARY, 6), nn.Linear(6, 6)
        self.head = nn.Linear(6, VOCABULARY)
        self.far = nn.Parameter(torch.randn(6))
        self.long, self.seen, self.kind = long, [], "whole"
        self.double()

    def forward(self, input_ids, attention_mask=None):
        x = self.words(input_ids)
        self.seen.append(tuple(input_ids.shape))
        long = input_ids.shape[1] > SHORT
        x = x.cumsum(1) / torch.arange(1, x.shape[1] + 1).view(-1, 1)
        x = self.mix(x.transpose(0, 1)).transpose(0, 1) if long and self.long == "turned" else self.mix(x)
        x = torch.tanh(x)
        if long and self.long == "mixed":
            x = x + x.mean(0, keepdim=True)
        if self.long != "parameter":
            x = x * self.far
        elif long:
            x = x + self.far
        if not long:
            self.kind = "short"
        return self.head(x)


def texts(n=7, length=LONG):
    torch.manual_seed(1)
    return Rows({"input_ids": torch.randint(VOCABULARY, (n, length))}, CausalLM().collate)


def test_few_passes_have_whole_texts():
    """And what short texts set in a model is gone."""
    model = Reads()
    plan(model, CausalLM(), texts())
    whole = [shape for shape in model.seen if shape[1] == LONG]
    assert whole == [(1, LONG), (2, LONG)]  # one with autograd, two through the collector
    assert len(model.seen) > len(whole) and {shape[1] for shape in model.seen} == {LONG, SHORT}
    assert model.kind == "whole"


@pytest.mark.parametrize("long", ["", "turned", "parameter"])
def test_features_are_those_of_autograd(long):
    """Where short texts tell something else, whole ones decide."""
    found, coverage = check(Reads(long), CausalLM(), texts(), batch_size=4)
    assert found == dict.fromkeys(found, "hook") | {"far": "expanded"}
    layouts = {use.name: use.layout for use in coverage.modules}
    assert layouts["mix"] == ("second" if long == "turned" else "front")


def test_texts_that_meet_each_other_when_they_are_long_are_refused():
    with pytest.raises(UndeError, match=r"alone but .* in a batch: features of an example must not depend"):
        plan(Reads("mixed"), CausalLM(), texts())


def test_one_text_and_texts_of_many_lengths():
    for lengths in ([LONG], [40, 3, 36, 5, 9]):
        torch.manual_seed(2)
        data = [{"input_ids": torch.randint(VOCABULARY, (n,))} for n in lengths]
        check(Reads().float(), CausalLM(), Rows(data, CausalLM().collate), "none", 1e-4, batch_size=1)


def test_the_probe_is_what_a_pass_gives(tmp_path):
    model, rows, task = Reads().float(), texts(), CausalLM()
    index = Index.build(model, task, rows, tmp_path / "i", method=TracIn(projection="none"), progress=False)
    m = index.manifest
    probe = read_shard(probe_path(index.folder, m), m.id)
    want = slow_gradients(model, task, Rows([rows[i] for i in probe["where"].tolist()], task.collate))
    assert len(probe["where"]) == 2
    assert_features(probe["features"], want, make_units(model, m.unit_names, "none", 0), 1e-5)


def test_what_is_cut_out_of_a_text():
    ids = torch.arange(2 * LONG).view(2, LONG)
    batching = CausalLM().batching
    plain = batching.shorten({"input_ids": ids, "weight": torch.tensor([1.0, 2.0])})
    assert torch.equal(plain["input_ids"], ids[:, :SHORT])
    assert torch.equal(plain["weight"], torch.tensor([1.0, 2.0]))
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    labels = ids.clone()
    labels[0, :20] = IGNORE  # a prompt
    labels[1, :39] = IGNORE  # a long one
    cut = batching.shorten({"input_ids": ids, "attention_mask": mask, "labels": labels})
    assert torch.equal(cut["input_ids"][0], ids[0, 19 : 19 + SHORT])
    assert torch.equal(cut["input_ids"][1], ids[1, LONG - SHORT :])
    assert all((row != IGNORE).any() for row in cut["labels"])
    padded = batching.shorten({"input_ids": ids, "attention_mask": mask})
    assert torch.equal(padded["input_ids"][1], ids[1, 5 : 5 + SHORT]) and padded["attention_mask"].all()


@pytest.mark.parametrize(
    "batch",
    [
        torch.zeros(2, LONG),
        {"input_ids": torch.zeros(2, 2 * SHORT - 1)},
        {"input_ids": torch.zeros(2, LONG), "attention_mask": torch.zeros(2, 1, LONG, LONG)},
        {"input_ids": torch.zeros(2, LONG), "cache": object()},
    ],
    ids=["no columns", "short already", "a mask of pairs", "something else"],
)
def test_what_is_not_cut(batch):
    assert CausalLM().batching.shorten(batch) is None
