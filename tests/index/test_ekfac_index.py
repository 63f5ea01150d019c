"""Covariances of EKFAC on disk, from hooks written out here; test_fisher.py has the scores."""

import pytest
import torch
from test_index_tokens import gpt2, sentences
from torch.testing import assert_close

import toy
from unde import Index, UndeError
from unde.methods import EKFAC, TRAK, LoGRA, TracIn
from unde.projection import Projection
from unde.tasks import CausalLM, Classification


def passes(model, task, batch):
    """{layer: inputs (n, in)}, {layer: output gradients (n, out)} of plain linear layers."""
    inputs, outputs, handles = {}, {}, []
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):

            def keep(_m, args, out, name=name):
                inputs[name], outputs[name] = args[0].detach(), out

            handles.append(module.register_forward_hook(keep))
    loss = task.loss(model, batch)
    grads = torch.autograd.grad(loss.sum(), list(outputs.values()))
    for h in handles:
        h.remove()
    return inputs, dict(zip(outputs, grads))


def close(got, want, tolerance=2e-4):
    assert (got.double() - want.double()).norm() <= tolerance * want.double().norm()


def test_projected_covariances_and_features(tmp_path):
    """A, G are covariances of projected inputs and output gradients."""
    index = toy.build(tmp_path / "i", method=EKFAC(projection="kron(2)"))
    inputs, outputs = passes(toy.net(), Classification(), toy.data(22))
    for layer in ("0", "2"):
        name = f"{layer}.weight"
        p = Projection("kron(2)", name, dict(toy.net().named_parameters())[name].shape)
        left, right = p.rows(outputs[layer]), p.cols(inputs[layer])
        got = toy.factors(index)[name]
        assert_close(got[0].float(), left.T @ left, rtol=1e-5, atol=1e-6)
        assert_close(got[1].float(), right.T @ right, rtol=1e-5, atol=1e-6)
    assert set(toy.factors(index)) == {"0.weight", "2.weight"}


def test_logra_full_is_trak(tmp_path):
    index = toy.build(tmp_path / "i", method=LoGRA(blocks="full", projection="kron(2)"))
    queries = toy.data(5, seed=3)
    assert_close(index.score(queries).total(), index.score(queries, TRAK(projection="kron(2)")).total())


def test_other_methods_score_on_an_ekfac_index_but_not_the_other_way_round(tmp_path):
    queries = toy.data(5, seed=3)
    plain = toy.build(tmp_path / "plain")
    rich = toy.build(tmp_path / "rich", method=EKFAC(projection="none"))
    for method in ("tracin", "trak", "logra"):
        assert_close(rich.score(queries, method).total(), plain.score(queries, method).total())
    with pytest.raises(UndeError, match=r"holds no covariances.*build it with method='ekfac'"):
        plain.score(queries, "ekfac").total()
    with pytest.raises(UndeError, match=r"no gradients with sampled labels"):
        rich.score(queries, EKFAC(fisher="sampled")).total()


def test_bad_examples_leave_the_covariances_alone(tmp_path):
    x, y = toy.data(22)
    keep = [i for i in range(22) if i != 5]
    x_bad = x.clone()
    x_bad[5] = torch.nan
    method = EKFAC(projection="kron(2)")
    skipped = toy.build(tmp_path / "bad", train_data=(x_bad, y), method=method, on_bad="skip")
    without = toy.build(tmp_path / "good", train_data=(x[keep], y[keep]), method=method)
    toy.same_factors(skipped, without, rtol=1e-5, atol=1e-7)
    queries = toy.data(3, seed=3)
    a, b = skipped.score(queries).total()[:, keep], without.score(queries).total()
    close(a / a.norm(), b / b.norm(), 1e-4)  # the mean is over 22 in one and 21 in the other


def test_padding_is_not_counted_and_an_input_covariance_by_hand(tmp_path):
    """Batches of ragged lengths give the covariances of the sequences alone."""
    model, train = gpt2(), sentences(9)
    options = {"method": EKFAC(projection="kron(3)"), "progress": False}
    made = {
        size: Index.build(model, CausalLM(), train, tmp_path / f"{size}", batch_size=size, **options)
        for size in (1, 9)
    }
    assert len(toy.factors(made[1])) == 6  # wte, wpe, c_attn, c_proj, c_fc, c_proj
    toy.same_factors(made[9], made[1], rtol=1e-4, atol=1e-6)
    queries = sentences(3, seed=1)
    assert_close(made[9].score(queries).total(), made[1].score(queries).total(), rtol=1e-3, atol=1e-4)
    options = {"method": EKFAC(projection="kron(3)"), "batch_size": 4, "progress": False}
    index = Index.build(model, CausalLM(), train, tmp_path / "i", **options)
    kept = []
    layer = model.transformer.h[0].mlp.c_fc
    handle = layer.register_forward_hook(lambda _m, args, _o: kept.append(args[0].detach()))
    with torch.no_grad():
        for row in train:
            model(input_ids=row["input_ids"][None])
    handle.remove()
    p = Projection("kron(3)", "transformer.h.0.mlp.c_fc.weight", tuple(layer.weight.shape))
    x = p.rows(torch.cat([k[0] for k in kept]))  # stored (in, out): inputs are the rows
    got = toy.factors(index)["transformer.h.0.mlp.c_fc.weight"][0]
    assert_close(got.float(), x.T @ x, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("method", "options", "said"),
    [
        (LoGRA, {"projection": "sjlt(64)"}, r"sjlt\(64\) projects it whole"),
        (EKFAC, {"projection": "sjlt(64)"}, r"sjlt\(64\) projects it whole"),
        (EKFAC, {"fisher": "other"}, r"fisher 'other'"),
        (LoGRA, {"blocks": "layers"}, r"blocks 'layers'"),
    ],
)
def test_refused_options(method, options, said):
    with pytest.raises(UndeError, match=said):
        method(**options)
    assert TracIn().factors is False


def test_padding_of_a_text_classifier_is_not_counted(tmp_path):
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    layers = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 12}
    config = BertConfig(vocab_size=30, num_labels=2, **layers)
    model = BertForSequenceClassification(config).eval()
    lengths, wholes = (4, 9, 6), []
    for i, length in enumerate(lengths):
        wholes.append(torch.randint(30, (length,), generator=torch.Generator().manual_seed(i)))

    def padded(width):
        ids = torch.stack([torch.nn.functional.pad(x, (0, width - len(x))) for x in wholes])
        keep = torch.arange(width) < torch.tensor(lengths)[:, None]
        return {"input_ids": ids, "attention_mask": keep.long(), "labels": torch.tensor([0, 1, 0])}

    options = {"method": EKFAC(projection="kron(3)"), "progress": False}
    short, long = (
        Index.build(model, Classification(), padded(w), tmp_path / f"{w}", **options) for w in (9, 14)
    )
    toy.same_factors(long, short, rtol=1e-4, atol=1e-5)
