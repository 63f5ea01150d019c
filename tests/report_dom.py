"""A strict little HTML tree for the tests: unbalanced tags and stray characters are errors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser

VOID = {"br", "img", "input", "link", "meta", "wbr"}


@dataclass
class Node:
    tag: str
    attributes: dict[str, str | None] = field(default_factory=dict)
    children: list[Node | str] = field(default_factory=list)

    @property
    def classes(self) -> set[str]:
        return set((self.attributes.get("class") or "").split())

    @property
    def text(self) -> str:
        return "".join(child if isinstance(child, str) else child.text for child in self.children)

    def walk(self) -> Iterator[Node]:
        yield self
        for child in self.children:
            if isinstance(child, Node):
                yield from child.walk()

    def all(self, selector: str) -> list[Node]:
        """Descendants by "tag", "tag.class.class" or "#id", or by several of these, one inside another."""
        found = [self]
        for part in selector.split():
            found = [
                inner for node in found for inner in node.walk() if inner is not node and _fits(inner, part)
            ]
        return found

    def one(self, selector: str) -> Node:
        found = self.all(selector)
        assert len(found) == 1, f"{len(found)} elements for {selector!r}"
        return found[0]


def _fits(node: Node, part: str) -> bool:
    if part.startswith("#"):
        return node.attributes.get("id") == part[1:]
    tag, *kinds = part.split(".")
    return (not tag or node.tag == tag) and node.classes.issuperset(kinds)


class _Builder(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.root = Node("")
        self.open = [self.root]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = [name for name, _ in attrs]
        assert len(names) == len(set(names)), f"attribute twice in <{tag}>: {names}"
        node = Node(tag, dict(attrs))
        self.open[-1].children.append(node)
        if tag not in VOID:
            self.open.append(node)

    def handle_endtag(self, tag: str) -> None:
        assert self.open[-1].tag == tag, f"</{tag}> closes <{self.open[-1].tag}>"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        self.open[-1].children.append(data)


def parse(markup: str) -> Node:
    builder = _Builder()
    builder.feed(markup)
    builder.close()
    assert builder.open == [builder.root], f"never closed: {[node.tag for node in builder.open[1:]]}"
    ids = [node.attributes["id"] for node in builder.root.walk() if "id" in node.attributes]
    assert len(ids) == len(set(ids)), f"an id is used twice: {ids}"
    return builder.root


def words(node: Node) -> str:
    """The text of an element as it is read, with runs of space closed up."""
    return " ".join(node.text.split())
