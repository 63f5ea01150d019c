"""What can be asked: a held-out query, a training example, a text, a picture, a prompt; and sets of these."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from unde.errors import UndeError, unknown

LONGEST = 100_000  # characters of a text
MANY = 64  # questions in a set
KINDS = ("eval", "learn", "train", "text", "picture", "prompt")


@dataclass(frozen=True)
class Question:
    """One thing to ask about; `label` is the class asked about, if it is not the example's own."""

    kind: str
    at: int | None = None  # which query or training example
    text: str | None = None  # typed, or a prompt
    picture: str | None = None  # the digest of one that was sent
    seed: int = 0
    label: int | None = None

    @classmethod
    def read(cls, said: Any) -> Question:
        """From JSON of the page, or of an address that somebody has typed."""
        if not isinstance(said, Mapping) or said.get("kind") not in KINDS:
            kind = said.get("kind") if isinstance(said, Mapping) else said
            raise unknown("kind of question", str(kind)[:40], KINDS)
        kind, at, text = said["kind"], said.get("at"), said.get("text")
        if kind in ("eval", "learn", "train") and not _whole(at):
            raise UndeError(f"which {kind} example? Expected a position, not {str(at)[:40]!r}")
        if kind == "text" and (not isinstance(text, str) or not text.strip()):
            raise UndeError("nothing was asked: type a text")
        if text is not None and (not isinstance(text, str) or len(text) > LONGEST):
            raise UndeError(f"the text is too long: expected at most {LONGEST:,} characters")
        if kind == "picture" and not isinstance(said.get("picture"), str):
            raise UndeError("no picture was given: choose or drop a PNG or JPEG file")
        seed, label = said.get("seed", 0), said.get("label")
        if not _whole(seed) or seed >= 2**63:
            raise UndeError(f"a seed of {str(seed)[:40]!r}: expected a whole number from 0 on")
        if label is not None and not _whole(label):
            raise UndeError(f"unknown label {str(label)[:40]!r}: expected the number of a class")
        if kind in ("eval", "learn", "train"):
            return cls(kind, at=at, label=label)
        if kind == "text":
            return cls(kind, text=text, label=label)
        if kind == "picture":
            return cls(kind, text=text or None, picture=said["picture"][:64], label=label)
        return cls(kind, text=text or "", seed=seed)

    @property
    def said(self) -> dict[str, Any]:
        """As the page would say it."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    @property
    def key(self) -> str:
        return json.dumps(self.said, sort_keys=True)


@dataclass(frozen=True)
class Inquiry:
    """The mean of some questions, less the mean of others; under a method and a damping."""

    plus: tuple[Question, ...]
    minus: tuple[Question, ...] = ()
    method: str | None = None
    damping: float | None = None

    @classmethod
    def read(cls, said: Any) -> Inquiry:
        if not isinstance(said, Mapping):
            raise UndeError("a question is a JSON object")
        sides = []
        for side in ("plus", "minus"):
            some = said.get(side, [])
            if not isinstance(some, list) or len(some) > MANY:
                raise UndeError(f"a set of questions: expected a list of at most {MANY}")
            sides.append(tuple(Question.read(one) for one in some))
        if not sides[0]:
            raise UndeError("nothing was asked: choose a query, or type one")
        method, damping = read_method(said)
        return cls(sides[0], sides[1], method, damping)

    @property
    def key(self) -> str:
        content = [[q.key for q in self.plus], [q.key for q in self.minus], self.method, self.damping]
        return hashlib.blake2b(json.dumps(content).encode(), digest_size=12).hexdigest()


def read_method(said: Mapping[str, Any]) -> tuple[str | None, float | None]:
    method, damping = said.get("method"), said.get("damping")
    if method is not None and not isinstance(method, str):
        raise UndeError(f"a method of {str(method)[:40]!r}: expected a name")
    if damping is not None:
        if not isinstance(damping, (int, float)) or isinstance(damping, bool) or not 0 <= damping <= 1e6:
            raise UndeError(f"damping {str(damping)[:40]!r}: expected a number from 0 to 1,000,000")
        damping = float(damping)
    return method, damping


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
