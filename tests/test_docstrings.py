"""Public functions and classes explain their arguments, results and errors, and show an example."""

import inspect

import pytest

import unde
from unde import evaluate, methods, tasks

FUNCTIONS = {
    "unde.learn_weights": unde.learn_weights,
    **{
        f"unde.Index.{name}": getattr(unde.Index, name)
        for name in (
            *(
                "build",
                "open",
                "finish",
                "merge",
                "plan",
                "verify",
                "append",
                "remove",
                "repack",
                "features",
                "score",
            ),
            *("learn_weights", "calibrate", "self_influence", "trust", "diagnose", "add_fisher"),
        )
    },
    **{
        f"unde.GroupScores.{name}": getattr(unde.GroupScores, name)
        for name in ("total", "top", "regroup", "rescore")
    },
    **{
        f"unde.Groups.{name}": getattr(unde.Groups, name)
        for name in ("by_tensor", "by_layer", "consecutive", "by_pattern")
    },
    **{
        f"unde.evaluate.{name}": getattr(evaluate, name)
        for name in ("lds", "compare", "mislabel_auc", "tail_patch", "recall_at_k")
    },
    "unde.evaluate.Bank.run": evaluate.Bank.run,
    "unde.Weights.save": unde.Weights.save,
    "unde.Weights.load": unde.Weights.load,
}
CLASSES = [
    *(unde.Groups, unde.GroupScores, unde.Index, unde.Setup, unde.Task, unde.Weights),
    *(evaluate.Bank, evaluate.Estimate, tasks.Classification, tasks.CausalLM, tasks.Diffusion),
    *(
        methods.TracIn,
        methods.TRAK,
        methods.LoGRA,
        methods.EKFAC,
        methods.DTRAK,
        methods.JourneyTRAK,
        methods.DAS,
    ),
]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_explain_their_arguments(name):
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


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_show_an_example(name):
    owner = FUNCTIONS[name]
    assert ">>>" in (inspect.getdoc(owner) or ""), name


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_classes_are_documented(cls):
    assert len(inspect.getdoc(cls) or "") > 60
