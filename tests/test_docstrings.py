"""Public functions and classes explain their arguments, results and errors, and show an example."""

import inspect

import pytest

import unde
from unde import evaluate, methods, tasks

OWNERS = {
    "unde": (unde, "learn_weights select"),
    "unde.Index": (
        unde.Index,
        "build open finish merge plan verify append remove features score learn_weights calibrate "
        "self_influence audit_labels diagnose add_fisher",
    ),
    "unde.GroupScores": (unde.GroupScores, "total top regroup rescore"),
    "unde.Groups": (unde.Groups, "by_tensor by_layer consecutive by_pattern"),
    "unde.evaluate": (
        evaluate,
        "lds compare compare_choices counterfactual mislabel_auc tail_patch recall_at_k text_overlaps",
    ),
    "unde.evaluate.Bank": (evaluate.Bank, "run"),
    "unde.Weights": (unde.Weights, "save load"),
}
FUNCTIONS = {f"{owner}.{f}": getattr(of, f) for owner, (of, names) in OWNERS.items() for f in names.split()}
METHODS = ("TracIn", "TRAK", "LoGRA", "EKFAC", "DTRAK", "JourneyTRAK", "DAS")
CLASSES = [
    *(unde.Groups, unde.GroupScores, unde.Index, unde.Setup, unde.Task, unde.Weights),
    *(evaluate.Bank, evaluate.Estimate, tasks.Classification, tasks.CausalLM, tasks.Diffusion),
    *(getattr(methods, name) for name in METHODS),
]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_explain_their_arguments_and_show_an_example(name):
    function = FUNCTIONS[name]
    text = inspect.getdoc(function) or ""
    parameters = [p for p in inspect.signature(function).parameters if p not in ("self", "cls")]
    assert text.split("\n")[0].endswith("."), "the summary is one sentence"
    if parameters:
        assert "Args:" in text
        missing = [
            p for p in parameters if f"\n    {p}" not in text and f"{p}:" not in text and f"{p}," not in text
        ]
        assert not missing, missing
    if inspect.signature(function).return_annotation not in (None, "None"):
        assert "Returns:" in text
    assert ">>>" in text


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_classes_are_documented(cls):
    assert len(inspect.getdoc(cls) or "") > 60
