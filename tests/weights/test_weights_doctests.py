import doctest
import importlib
import pkgutil

import pytest

import unde.weights

NAMES = [info.name for info in pkgutil.iter_modules(unde.weights.__path__, "unde.weights.")]


@pytest.mark.parametrize("name", NAMES)
def test_examples_run_as_printed(name):
    assert doctest.testmod(importlib.import_module(name)).failed == 0


def test_public_functions_have_examples():
    for module, name in (("weights", "Weights"), ("learn", "learn_weights"), ("choose", "choose")):
        item = getattr(importlib.import_module(f"unde.weights.{module}"), name)
        assert ">>>" in (item.__doc__ or ""), name
