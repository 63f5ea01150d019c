"""What a kernel is, in words that are equal for equal kernels: by these its files are found again."""

from __future__ import annotations

from typing import Any

from unde.errors import UndeError
from unde.tasks.base import describe, digest_json, is_builtin


def describe_kernel(kernel: Any, method: str = "") -> str:
    """Settings, and for a user's own kernel also its class and `version`, so that files of another one are not used.

    >>> from unde.kernels import Gram
    >>> describe_kernel(Gram(0.1))
    "Gram(damping=0.1, relative=True, form='auto', blocks='full', fisher='empirical', damping_scope='layer')"
    """
    kind = type(kernel)
    if is_builtin(kind):
        return repr(kernel)
    of = f" of the method {method}" if method else ""
    missing = [name for name in ("bind", "fisher") if not hasattr(kernel, name)]
    if missing:
        raise UndeError(
            f"the kernel{of} is a {kind.__name__} without {' and '.join(missing)}: expected one of unde.kernels, or an "
            "object that has what unde.kernels.Kernel names"
        )
    try:
        hash(kernel)
    except TypeError:
        raise UndeError(
            f"the kernel {kind.__name__}{of} cannot be hashed: write it as a @dataclass(frozen=True) of numbers and "
            "names"
        ) from None
    settings = digest_json([describe(kernel, kind.__module__), getattr(kernel, "version", 1)])
    return f"{kind.__module__}:{kind.__qualname__} {settings}"


def code_key(kernel: Any) -> str:
    """What tells the moments of a kernel of the user's own from those of another; "" for kernels of unde."""
    return "" if is_builtin(type(kernel)) else f" {describe_kernel(kernel)}"
