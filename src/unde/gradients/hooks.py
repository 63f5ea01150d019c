"""Hooked modules: which parameters they hold, where their layer is called, and which axis holds the examples.

Some modules do more than their layer: scale an embedding, shift its positions, choose experts by a linear map. There
the hook is on the call of the torch function with the module's weight (`Rule.inside`), not on the module.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from unde.errors import UndeError
from unde.gradients.layers import Rule, rule_for
from unde.gradients.parameters import Unit

# Which axis of a module's input and output holds the examples of a batch.
FRONT = "front"  # the first, possibly with more folded in behind it: (B, ...) or (B·n, ...)
SECOND = "second"  # the second: (T, B, ...)
SHARED = "shared"  # none: one tensor serves all examples, as position embeddings do

FAILURES = (  # of a pass with a wrong layout
    RuntimeError,
    TypeError,
    ValueError,
    IndexError,
    NotImplementedError,
    AssertionError,
)
_CASTS = (Tensor.to, Tensor.type, Tensor.float, Tensor.double, Tensor.half, Tensor.bfloat16)
_GENERAL = ("deferred", "vmapped", "looped", "unused")

# (module, args, kwargs, output) → replacement of the output, or None
Hook = Callable[[nn.Module, tuple[Any, ...], dict[str, Any], Any], Any]


@dataclass
class HookedModule:
    """A module with its rule, the unit of each of its parameters, and its layout (None: never called)."""

    name: str
    module: nn.Module
    rule: Rule
    units: dict[str, Unit]
    layout: str | None = FRONT
    singleton: bool = False  # SHARED tensors have an axis of length one for the examples

    @property
    def unit_names(self) -> set[str]:
        return {unit.name for unit in self.units.values()}

    def keep_units(self, keep: Callable[[str, Unit], bool]) -> None:
        """Drop the units for which `keep(parameter, unit)` is false."""
        self.units = {k: u for k, u in self.units.items() if keep(k, u)}
        self.rule.projections = {k: u.projection for k, u in self.units.items()}

    def arrange(self, x: Tensor, batch: int) -> Tensor:
        """An input or output of the module, its examples in front."""
        return self.batch_first(
            expand_shared(x, batch, self.singleton) if self.layout == SHARED else x, batch
        )

    def batch_first(self, x: Tensor, batch: int) -> Tensor:
        """The same for tensors that have a row for each example, as output gradients."""
        x = x.transpose(0, 1) if self.layout == SECOND else x
        if x.shape[0] % batch:
            raise UndeError(
                f"module {self.name!r} got a tensor of shape {tuple(x.shape)} in a batch of {batch}: its first axis "
                "is no multiple of the batch, though it was for the examples tried at the start. "
                f"Exclude its parameters with exclude=[{self.name!r}] or use batch_size=1"
            )
        return x


@dataclass
class Coverage:
    """How the gradient of each unit is computed; parameters without a rule are listed by name."""

    modules: list[HookedModule] = field(default_factory=list)
    expanded: dict[str, tuple[int, ...]] = field(default_factory=dict)  # name → leading shape of a copy
    deferred: list[str] = field(default_factory=list)
    vmapped: list[str] = field(default_factory=list)
    looped: list[str] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)  # no gradient on the examples tried

    def describe(self) -> dict[str, Any]:
        """Plain values, which `restore_coverage` reads."""
        modules = {
            m.name: {
                "layout": m.layout,
                "singleton": m.singleton,
                "units": {k: u.name for k, u in m.units.items()},
            }
            for m in self.modules
        }
        expanded = {name: list(shape) for name, shape in self.expanded.items()}
        return {"modules": modules, "expanded": expanded, **{name: getattr(self, name) for name in _GENERAL}}


def restore_coverage(record: dict[str, Any], model: nn.Module, units: Sequence[Unit]) -> Coverage:
    """The coverage from `Coverage.describe`, on this model.

    Raises:
        UndeError: A module of the record has no rule in this model.
    """
    by_name = {m.name: m for m in find_modules(model, units)}
    missing = [name for name in record["modules"] if name not in by_name]
    if missing:
        raise UndeError(
            f"module {missing[0]!r} of the model is of another kind than when its index was begun. Use the same "
            "version of the model's code, or build another index"
        )
    modules = []
    for name, entry in record["modules"].items():
        hooked = by_name[name]
        hooked.layout, hooked.singleton = entry["layout"], entry["singleton"]
        hooked.keep_units(lambda k, u, names=entry["units"]: names.get(k) == u.name)
        modules.append(hooked)
    expanded = {name: tuple(shape) for name, shape in record["expanded"].items()}
    return Coverage(modules, expanded, **{name: list(record[name]) for name in _GENERAL})


def find_modules(model: nn.Module, units: Sequence[Unit]) -> list[HookedModule]:
    """Every module with a rule that holds an attributed parameter; all of them for a tied parameter."""
    parameters = dict(model.named_parameters())
    unit_of = {id(parameters[u.name]): u for u in units}
    modules = []
    for name, module in model.named_modules():
        held = {k: unit_of[id(p)] for k, p in module._parameters.items() if id(p) in unit_of}
        rule = rule_for(module) if held else None
        if rule is not None:
            held = {k: u for k, u in held.items() if k in rule.names(module)}
            rule_of_module = rule(module, {k: u.projection for k, u in held.items()})
            modules.append(HookedModule(name, module, rule_of_module, held))
    return [m for m in modules if m.units]


def expand_shared(x: Tensor, batch: int, singleton: bool) -> Tensor:
    """(1, ...) with a singleton axis for examples, or (...) without one → (B, ...), without copying."""
    x = x if singleton and x.shape[0] == 1 else x.unsqueeze(0)
    return x.expand(batch, *x.shape[1:])


# --- where the layer is called ------------------------------------------------------------------------------


def attach(hooked: HookedModule, hook: Hook) -> Callable[[], None]:
    """Call `hook` at every call of the layer; returns a function that removes it."""
    function = hooked.rule.inside
    if function is None:
        return hooked.module.register_forward_hook(hook, with_kwargs=True).remove
    open_calls: list[_InnerCalls] = []

    def enter(module: nn.Module, _args: Any) -> None:
        call = _InnerCalls(module, function, hook)
        call.__enter__()
        open_calls.append(call)

    def leave(_module: nn.Module, _args: Any, _output: Any) -> None:
        open_calls.pop().__exit__(None, None, None)

    before = hooked.module.register_forward_pre_hook(enter)
    after = hooked.module.register_forward_hook(leave, always_call=True)

    def remove() -> None:
        before.remove()
        after.remove()

    return remove


class _InnerCalls(TorchFunctionMode):
    """Hooks calls of one function with the module's weight, also after a cast of the weight."""

    def __init__(self, module: nn.Module, function: Callable[..., Any], hook: Hook) -> None:
        super().__init__()
        self.module, self.function, self.hook = module, function, hook
        self.weights: list[Any] = [module.weight]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func is self.function:
            if any(x is w for x in (*args[1:], *kwargs.values()) for w in self.weights):
                x = args[0] if args else kwargs["input"]
                replacement = self.hook(self.module, (x,), {}, out)
                return out if replacement is None else replacement
        elif func in _CASTS and any(args[0] is w for w in self.weights):
            self.weights.append(out)
        return out


# --- which axis holds the examples --------------------------------------------------------------------------


@contextmanager
def guess_layouts(
    modules: Sequence[HookedModule], batch: int, expand: bool = False
) -> Generator[dict[str, list[str]]]:
    """Inside, a pass of `batch` examples sets the likeliest layout of each module at its first call. Yields the other
    layouts to try, by module in the order of calls. With `expand`, outputs of SHARED modules are expanded."""
    options: dict[str, list[str]] = {}
    removals = []

    def guess(m: HookedModule, _module: nn.Module, args: Any, kwargs: Any, out: Tensor) -> Tensor | None:
        x = args[0] if args else next(iter(kwargs.values()), None)
        if not isinstance(x, Tensor) or not isinstance(out, Tensor) or not x.dim():
            return None  # as if it had not been called
        possible = _layouts(tuple(x.shape), batch)
        if m.name not in options:
            m.layout, options[m.name] = possible[0], possible[1:]
            m.singleton = x.shape[0] == 1
        else:  # a later call
            options[m.name] = [layout for layout in options[m.name] if layout in possible]
        return expand_shared(out, batch, m.singleton) if expand and m.layout == SHARED else None

    try:
        for m in modules:
            m.layout = None
            removals.append(attach(m, partial(guess, m)))
        yield options
    finally:
        for remove in removals:
            remove()


def first_guess(
    modules: Sequence[HookedModule], batch: int, run: Callable[[], object]
) -> dict[str, list[str]]:
    """Set the likeliest layout of each module in a pass `run` of its own; returns the others to try."""
    try:
        with torch.no_grad(), guess_layouts(modules, batch, expand=True) as options:
            run()
    except FAILURES:
        with torch.no_grad(), guess_layouts(modules, batch) as options:
            run()
    return options


def _layouts(shape: tuple[int, ...], batch: int) -> list[str]:
    """Layouts to try, likeliest first."""
    second = [SECOND] if len(shape) > 1 and shape[1] == batch else []
    if shape[0] % batch == 0:
        return [FRONT, *second, SHARED]
    return [*second, SHARED, FRONT]  # FRONT is possible behind a module that turns out to be shared


def next_layouts(modules: list[HookedModule], options: dict[str, list[str]]) -> list[HookedModule]:
    """Move modules to their next layout; only the first called to SHARED, as those behind it may be right then."""
    moved: list[HookedModule] = []
    for m in sorted(modules, key=lambda m: list(options).index(m.name)):
        if options[m.name][0] != SHARED or not any(other.layout == SHARED for other in moved):
            m.layout = options[m.name].pop(0)
            moved.append(m)
    return moved
