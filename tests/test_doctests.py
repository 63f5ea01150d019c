"""The examples in all docstrings of the package run as printed."""

import doctest
import importlib
import inspect
import pkgutil

import pytest

import unde

MODULES = ["unde", *(module.name for module in pkgutil.walk_packages(unde.__path__, "unde."))]
OPTIONAL = {
    "unde.evaluate.baselines": "bm25s",
    "unde.integrations.transformers": "transformers",
}
MADE = {"Comparison", "FineGrained"}  # by functions, and shown there
PUBLIC = [
    *(getattr(unde.evaluate, name) for name in unde.evaluate.__all__ if name not in MADE),
    *(unde.Weights, unde.learn_weights),
]


@pytest.mark.parametrize("name", MODULES)
def test_examples_run_as_printed(name):
    if name in OPTIONAL:
        pytest.importorskip(OPTIONAL[name])
    module = importlib.import_module(name)
    found, source = doctest.testmod(module), inspect.getsource(module)
    assert found.failed == 0
    # None hides where doctest does not look.
    assert found.attempted == source.count(">>> ") - source.count("# doctest: +SKIP")


@pytest.mark.parametrize("item", PUBLIC, ids=lambda item: item.__name__)
def test_public_names_have_an_example(item):
    assert any(test.examples for test in doctest.DocTestFinder().find(item, item.__name__))
