"""Builds on a device: features are those of the CPU, and are computed there."""

import pretended_device
import pytest
from settings import assert_near, build, stored

BUILDS = [
    ("mlp", "tracin", {}),
    ("mlp", "trak", {"projection": "dense(16)"}),
    ("mlp", "ekfac", {"projection": "factored(2)"}),
    ("resnet-batchnorm", "logra", {}),
    ("lstm", "tracin", {"projection": "sjlt(16)"}),
    ("gpt2", "ekfac", {}),
    ("llama", "logra", {"projection": "kron(4)"}),
    ("bert", "trak", {}),
    ("mixtral", "tracin", {"projection": "none"}),
    ("unet", "d-trak", {}),
    ("unet", "das", {}),
    ("lora", "ekfac", {"projection": "none"}),
]


@pytest.mark.parametrize(("name", "method", "options"), BUILDS)
def test_features_are_those_of_the_cpu(name, method, options, tmp_path, device, operations):
    here = build(name, tmp_path / "cpu", method=method, **options)
    assert pretended_device.counts[0].operations == 0
    there = build(name, tmp_path / "device", device, method=method, **options)
    assert_near(stored(there), stored(here))
    assert operations() > 100
    resolved = [index.manifest.resolved.coverage for index in (here, there)]
    assert resolved[0] == resolved[1]
