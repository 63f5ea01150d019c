"""Activations in one operation: the same numbers, and the model as it was."""

import pytest
import torch
from torch.func import grad, vmap
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.activations import NewGELUActivation

from cases import BY_NAME
from unde.gradients import floor
from unde.gradients.activations import quick_activations


class Operations(TorchDispatchMode):
    """The names of all that torch is asked to do."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(func._overloadpacket._qualified_op_name)
        return func(*args, **(kwargs or {}))


def _value_and_gradient(module, x):
    x = x.clone().requires_grad_()
    y = module(x)
    return y.detach(), torch.autograd.grad((y * torch.linspace(1, 2, y.numel()).to(y)).sum(), x)[0]


def test_the_same_function_in_one_operation():
    module, x = NewGELUActivation(), torch.linspace(-6, 6, 1001)
    exact, own = _value_and_gradient(module, x.double()), _value_and_gradient(module, x)
    with quick_activations(module), Operations() as asked:
        quick = _value_and_gradient(module, x)
        quick_exact = _value_and_gradient(module, x.double())
    assert "aten::gelu" in asked.seen and "aten::tanh" not in asked.seen
    for a, b, c, d in zip(exact, own, quick, quick_exact):
        assert (c - a).abs().max() <= 2 * (b - a).abs().max()  # rounded no worse than its single steps
        torch.testing.assert_close(d, a, rtol=1e-12, atol=1e-14)


def test_transformed_by_functorch():
    module, x = NewGELUActivation(), torch.linspace(-3, 3, 12).view(3, 4)
    slopes = vmap(grad(lambda row: module(row).square().sum()))
    own = slopes(x)
    with quick_activations(module):
        torch.testing.assert_close(slopes(x), own)


def test_half_precision_rounds_as_the_module_does():
    module, x = NewGELUActivation(), torch.linspace(-6, 6, 1001, dtype=torch.bfloat16)
    own = module(x)
    with quick_activations(module):
        assert torch.equal(module(x), own)
    assert not torch.equal(torch.nn.functional.gelu(x, approximate="tanh"), own)  # there is something to lose


def test_other_activations_stay():
    class Own(NewGELUActivation):
        pass

    patched = NewGELUActivation()
    patched.forward = torch.neg
    model, x = torch.nn.Sequential(Own(), patched), torch.ones(3)
    with quick_activations(model):
        assert "forward" not in vars(model[0]) and torch.equal(patched(x), -x)
    assert torch.equal(patched(x), -x)


def test_the_frozen_pass_of_gpt2_has_them_and_leaves_none():
    model, task, rows = BY_NAME["gpt2"].make(torch.float32)
    with Operations() as asked:
        floor.frozen(model, task, [rows.batch(range(2))])
    assert "aten::gelu_backward" in asked.seen and "aten::tanh" not in asked.seen
    assert not any("forward" in vars(m) for m in model.modules())
    with pytest.raises(ValueError, match="stop"), quick_activations(model):
        raise ValueError("stop")
    assert not any("forward" in vars(m) for m in model.modules())
