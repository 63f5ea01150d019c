"""What the library refuses, with which words."""

from collections.abc import Callable

import pytest

from unde import UndeError


def refused(message: str, call: Callable[..., object], /, *arguments: object, **options: object) -> None:
    """The call raises a UndeError that matches a regular expression."""
    with pytest.raises(UndeError, match=message):
        call(*arguments, **options)
