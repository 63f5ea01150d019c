"""The live page on an open index: ask, see which training examples answered, play with what counts.

`Session` holds the index, the model and what was asked; it knows nothing of the web. `app` puts it behind a few
addresses, `security` in front of them, `static/` is what runs in the browser. `unde serve` starts it all.
"""

from unde.ui.explorer.session import Session

__all__ = ["Session"]
