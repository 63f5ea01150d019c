"""Models as they are when training ends: compiled, dispatched over devices, adapters on a quantised base."""

import copy

import pytest
import torch

import models
from cases import randomized
from oracles import check, slow_gradients
from unde import Groups, Index
from unde.data import Rows
from unde.methods import TracIn
from unde.tasks import CausalLM
from zoo import BY_NAME, make


def broken_compiler(*_args):
    raise AssertionError("nothing is compiled for features")


def test_compiled_models_are_unwrapped(tmp_path):
    """The same names, ways and bits as of the model that was compiled, and the compiler is never asked."""
    model, task, rows = make(BY_NAME["gpt2-tied"], torch.float32)
    compiled = torch.compile(model, backend=broken_compiler)
    assert Groups.by_layer(compiled) == Groups.by_layer(model)
    method = TracIn(projection="none")
    found = []
    for m, name in ((model, "plain"), (compiled, "compiled")):
        index = Index.build(m, task, rows.data, tmp_path / name, method=method, progress=False)
        assert index.manifest.unit_names == [n for n, _ in model.named_parameters()]
        assert not index.manifest.resolved.coverage[0]["looped"]
        found.append(index.score(rows.data[:2]).total())
    assert torch.equal(*found)
    opened = Index.open(tmp_path / "plain", model=compiled, task=task)
    assert torch.equal(opened.score(rows.data[:2]).total(), found[0])


def test_compiled_parts_run_as_they_were_written():
    model, task, rows = make(BY_NAME["llama"])
    truth = slow_gradients(model, task, rows)
    for layer in model.model.layers:
        layer.compile(backend=broken_compiler)
    found, _ = check(model, task, rows, truth=truth)
    assert set(found.values()) == {"hook"}


@pytest.mark.parametrize("split", [False, True])
def test_dispatched_models(split):
    """The hooks of accelerate replace forward on every module; features are those without them."""
    accelerate = pytest.importorskip("accelerate")
    model, task, rows = make(BY_NAME["llama"])
    truth = slow_gradients(model, task, rows)
    places = dict.fromkeys(["model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm"], "cpu")
    places |= {"model.rotary_emb": "cpu", "lm_head": "cpu"}
    accelerate.dispatch_model(model, places if split else {"": "cpu"}, main_device="cpu", force_hooks=True)
    assert hasattr(model.lm_head if split else model, "_hf_hook")
    found, _ = check(model, task, rows, truth=truth)
    assert set(found.values()) == {"hook"}


def quantised_llama():
    """Adapters of rank 2 in float32 on int8 weights, and the same with the weights that int8 stands for."""
    peft, quantization = pytest.importorskip("peft"), pytest.importorskip("torchao.quantization")
    torch.manual_seed(0)
    config = peft.LoraConfig(r=2, lora_alpha=3, target_modules=["q_proj", "v_proj", "down_proj"])
    base = randomized(models.llama()).eval()
    quantization.quantize_(base, quantization.Int8WeightOnlyConfig())
    exact = randomized(models.llama()).eval()
    weights = base.state_dict().items()
    packed = {k: hasattr(v, "dequantize") and type(v) is not torch.Tensor for k, v in weights}
    exact.load_state_dict({k: v.dequantize() if packed[k] else v for k, v in weights})
    torch.manual_seed(1)
    exact = peft.get_peft_model(exact, config)
    for n, p in exact.named_parameters():
        if "lora_" in n:
            torch.nn.init.normal_(p, std=0.2)
    quantised = peft.get_peft_model(base, copy.deepcopy(config))
    own = dict(exact.named_parameters())
    with torch.no_grad():
        for n, p in quantised.named_parameters():
            if "lora_" in n:
                p.copy_(own[n])
    return quantised.eval(), exact.eval()


def test_adapters_on_a_quantised_base(tmp_path):
    quantised, exact = quantised_llama()
    data = [{"input_ids": torch.randint(1, 23, (4 + i,))} for i in range(6)]
    task = CausalLM()
    rows = Rows(data, task.collate)
    truth = {n: g for n, g in slow_gradients(exact, task, rows).items() if "lora_" in n}
    # int8 products are rounded in another order
    found, _ = check(quantised, task, rows, "none", 1e-3, batch_size=4, truth=truth)
    assert set(found) == set(truth) and set(found.values()) == {"hook"}
    index = Index.build(
        quantised, task, data, tmp_path / "i", method=TracIn(projection="none"), progress=False
    )
    g = torch.cat([truth[n].flatten(1) for n in found], 1)
    torch.testing.assert_close(index.score(data[:2]).total(), g[:2] @ g.T, rtol=1e-2, atol=1e-4)
