"""What passes on a device cost and record: copies, waits, cuDNN, several devices, other precisions."""

from contextlib import contextmanager

import pytest
import torch
from settings import assert_near, build, make, stored
from torch import nn

from unde import Index, Setup, bench, console
from unde.gradients.feature_pass import FeaturePass


def count_of_a_pass(monkeypatch, pretended, name, folder, **options):
    """Copies down, waits, searches and operations between the beginnings of two passes of a build."""
    begin, seen = FeaturePass._begin, []

    def counting(self, *given):
        here = pretended.counts[0]
        searches = sum(v for k, v in here.waited.items() if k in ("nonzero", "bincount"))
        seen.append((here.down, here.waits, searches, here.operations))
        return begin(self, *given)

    monkeypatch.setattr(FeaturePass, "_begin", counting)
    build(name, folder, pretended.NAME, method="tracin", batch_size=2, **options)
    return [b - a for a, b in zip(seen[-2], seen[-1])]


@pytest.mark.parametrize("name", ["mlp", "llama", "resnet-batchnorm", "unet"])
def test_copies_of_a_pass_do_not_depend_on_the_parameters(name, tmp_path, monkeypatch, pretended):
    copies, *_ = count_of_a_pass(monkeypatch, pretended, name, tmp_path / "i")
    assert copies <= 4


def test_experts_are_no_loop(tmp_path, monkeypatch, pretended):
    """One copy of counts for all layers, and hardly more operations for more experts."""
    few, many = (
        count_of_a_pass(monkeypatch, pretended, name, tmp_path / name) for name in ("mixtral", "mixtral-16")
    )
    assert few[:3] == many[:3]
    copies, waits, searches, operations = many
    assert copies <= 4 and waits <= 8 and searches == 0
    assert operations < 1.2 * few[3]


def test_the_next_pass_begins_before_a_result_is_read(tmp_path, monkeypatch, pretended):
    events, begin = [], FeaturePass._begin

    def begun(self, *given):
        finish = begin(self, *given)
        events.append("begin")
        return lambda: (events.append("result"), finish())[1]

    monkeypatch.setattr(FeaturePass, "_begin", begun)
    build("mlp", tmp_path / "i", pretended.NAME, method="tracin", batch_size=3)
    assert events == ["begin", "begin", "result", "begin", "result", "result"]


def test_cudnn_is_off_for_recurrent_layers_and_in_the_check_alone(tmp_path, monkeypatch):
    seen = {"lstm": [], "mlp": []}
    for name, modes in seen.items():
        model, task, rows = make(name)
        model.register_forward_hook(lambda *_, modes=modes: modes.append(torch.backends.cudnn.enabled))
        build_options = {"method": "tracin", "projection": "kron(4)", "progress": False}
        Index.build(model, task, rows, tmp_path / name, **build_options)
    assert not any(seen["lstm"])
    assert not seen["mlp"][0] and seen["mlp"][-1]
    assert torch.backends.cudnn.enabled


def test_a_model_on_two_devices(tmp_path, pretended):
    class Split(nn.Module):
        def __init__(self, whole, places):
            super().__init__()
            self.first, self.last = whole[:2].to(places[0]), whole[2:].to(places[1])

        def forward(self, x):
            return self.last(self.first(x).to(next(self.last.parameters()).device)).to(x.device)

    _, task, rows = make("mlp")
    made, methods = {}, ("tracin", "trak", "logra", "ekfac")
    for places in (("cpu", "cpu"), ("pretended:0", "pretended:1")):
        for method in methods:
            index = Index.build(
                Split(make("mlp")[0], places), task, rows, tmp_path / f"{method} {places[0]}", method=method,
                projection="kron(4)", progress=False,
            )  # fmt: skip
            made[method, places[0]] = stored(index), index.score(rows.subset([0, 1])).total()
    for method in methods:
        for there, here in zip(made[method, "pretended:0"], made[method, "cpu"]):
            assert_near(there, here, 1e-4)
    assert pretended.counts[1].operations > 0


@pytest.mark.parametrize("main", [0, 1])
def test_a_model_that_accelerate_dispatched(main, tmp_path, pretended):
    """Its hooks move the inputs of modules after other hooks have seen them: token ids and positions here."""
    from accelerate import dispatch_model

    names = ("wte", "wpe", "h.0", "h.1", "ln_f")
    places = {f"transformer.{name}": f"pretended:{int(name in ('wpe', 'h.1'))}" for name in names}
    model, task, rows = make("gpt2")
    main_device = f"pretended:{main}"
    model = dispatch_model(model, places | {"lm_head": "pretended:0"}, main_device=main_device)
    options = {"method": "ekfac", "projection": "kron(4)"}
    there = Index.build(model, task, rows, tmp_path / "there", progress=False, **options)
    here = build("gpt2", tmp_path / "here", **options)
    assert_near(stored(there), stored(here))
    queries = rows.subset([0, 1])
    assert_near(there.score(queries).total(), here.score(queries).total(), 1e-4)


def test_half_precision_is_as_exact_as_its_format(tmp_path, device):
    exact = stored(build("llama", tmp_path / "float32", method="tracin"))
    _, task, rows = make("llama")
    options = {"method": "tracin", "projection": "kron(4)", "progress": False}
    for dtype, most in ((torch.bfloat16, 2**-4), (torch.float16, 2**-7)):
        model, *_ = make("llama", device)
        half = stored(Index.build(model.to(dtype), task, rows, tmp_path / str(dtype), **options))
        assert half.dtype == torch.float32
        assert float((half - exact).norm() / exact.norm()) < most
    with torch.autocast(torch.device(device).type, dtype=torch.bfloat16):
        mixed = stored(Index.build(make("llama", device)[0], task, rows, tmp_path / "mixed", **options))
    assert 0 < float((mixed - exact).norm() / exact.norm()) < 2**-4


def test_another_device_than_that_of_the_build_is_noted(tmp_path, pretended, monkeypatch):
    notes = []
    monkeypatch.setattr(console, "note", notes.append)
    index = build("mlp", tmp_path / "i", pretended.NAME, method="tracin")
    assert index.manifest.resolved.device == "pretended" and not notes
    model, task, rows = make("mlp")
    again = Index.open(tmp_path / "i", model=model, task=task, train_data=rows)
    assert "was computed on pretended, this model is on cpu" in notes[0]
    assert again.manifest.id == index.manifest.id


def test_bench_counts_what_each_stage_does(pretended):
    model, task, rows = make("mlp", pretended.NAME)
    setup = Setup(model, task, rows.data)
    found, counts = {}, pretended.counts[0]

    @contextmanager
    def counted(name):
        counts.restart()
        yield
        found[name] = counts.up_bytes + counts.down_bytes, counts.operations

    bench.run_stages(setup, 2, 40, counted)
    stages = bench.count_stages(setup, 2, 40)
    assert {name: (t.copied, t.operations) for name, t in stages.items()} == found
    assert all(t.moved > 4 * t.operations > 0 for t in stages.values())
    assert stages["plain training pass"].flops > 0 and len(stages) == 8
    report = bench.measure(setup, rank=2, batch_size=4, runs=1, batches=1)
    assert "by EKFAC, rank 2, on pretended:0:" in report and len(report.splitlines()) == 11
