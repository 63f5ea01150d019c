"""A picture that is on a page many times is in its file once: the others refer to it, without a script."""

from __future__ import annotations

import re
from collections import Counter

from unde.ui.report.html import Html, el

# As `items.picture` writes it. No text of a user can look like this: a < in it is written &lt;.
_IMG = re.compile(
    r'<img class="(?P<kind>picture[^"]*)" src="(?P<src>data:image/png;base64,[^"]*)" width="(?P<width>\d+)" '
    r'height="(?P<height>\d+)" alt="(?P<alt>[^"]*)" title="[^"]*">'
)


def each_picture_once(body: Html) -> Html:
    """The same page, with pictures that occur several times in one list, and drawn from there by <use>.

    An <svg> with a role and a label is to screen readers what an <img> with its alternative text is.
    """
    times = Counter(found["src"] for found in _IMG.finditer(body))
    number = {src: i for i, src in enumerate(src for src, n in times.items() if n > 1)}
    if not number:
        return body
    sizes: dict[str, tuple[str, str]] = {}

    def referring(found: re.Match[str]) -> str:
        src, width, height = found["src"], found["width"], found["height"]
        if src not in number:
            return found[0]
        sizes[src] = width, height
        return (
            f'<svg class="{found["kind"]}" viewBox="0 0 {width} {height}" role="img" aria-label="{found["alt"]}">'
            f'<title>{found["alt"]}</title><use href="#picture-{number[src]}"></use></svg>'
        )

    rest = _IMG.sub(referring, body)
    defined = [
        el(
            "symbol",
            {"id": f"picture-{number[src]}", "viewBox": f"0 0 {width} {height}"},
            el("image", {"href": src, "width": width, "height": height}),
        )
        for src, (width, height) in sizes.items()
    ]
    held = el("svg", {"class": "pictures", "width": 0, "height": 0, "aria-hidden": "true"}, defined)
    return Html(rest.replace("</body>", f"{held}</body>")) if rest.endswith("</body>") else Html(rest + held)
