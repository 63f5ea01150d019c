"""From a question to features: what it is about is read or made, shown, and put through the model once."""

from __future__ import annotations

import hashlib
import json
import threading
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import torch

from unde.data import Rows, to_device
from unde.errors import UndeError, unknown
from unde.gradients.model_state import frozen_eval
from unde.gradients.parameters import placement
from unde.index import Index
from unde.index.query_features import QueryFeatures
from unde.integrations.pictures import ImageFormat, decode_picture, with_label
from unde.methods import JourneyTRAK, Method
from unde.setup import Setup
from unde.tasks import Classification
from unde.ui.explorer.catalogue import Catalogue, as_example, figure
from unde.ui.explorer.jobs import BackgroundJob
from unde.ui.report.example_view import class_number
from unde.ui.report.items import Item
from unde.ui.report.panels import predictions

HELD = 128  # questions whose features are held
PICTURES = 32  # pictures that were sent


@dataclass
class QueryHeader:
    """How a question is shown above its answer."""

    name: str
    html: str
    notes: list[str] = field(default_factory=list)
    own: int | None = None  # the class it has
    predicted: int | None = None
    label: int | None = None  # the class asked about
    question: dict[str, Any] | None = None  # the one it is

    def as_dict(self, minus: bool) -> dict[str, Any]:
        return {k: v for k, v in asdict(self).items() if k != "question"} | {"minus": minus}


@dataclass
class ExplorerQuery:
    """A question with its features, as one query."""

    header: QueryHeader
    features: QueryFeatures | None
    digests: list[str]
    rows: Rows
    key: str = ""
    journey: bool = False  # whether it is followed along its trajectory


class QueryBuilder:
    """Makes queries of questions; features of those asked last are held."""

    def __init__(self, index: Index, setup: Setup, train: Catalogue, roles: Mapping[str, Catalogue]) -> None:
        self.index, self.setup, self.train, self.roles = index, setup, train, roles
        self.collate = train.rows.collate
        self.classifies = isinstance(setup.task, Classification)
        self.likeness = None if setup.ask.picture is not None else ImageFormat.of(train.rows)
        self.classes = train.classes if self.classifies else None
        if self.classifies and self.classes is None:
            self.classes = [str(c) for c in range(self._logits())]
        self._asked: OrderedDict[str, ExplorerQuery] = OrderedDict()
        self._pictures: OrderedDict[str, Any] = OrderedDict()
        self._lock = threading.Lock()

    def ways(self) -> dict[str, Any]:
        """What can be asked about, and how much of it there is."""
        ask = self.setup.ask
        return {
            **{role: len(some) for role, some in self.roles.items()},
            "train": len(self.train),
            "text": ask.text is not None,
            "picture": ask.picture is not None or (self.likeness is not None and self.train.kind == "image"),
            "sides": None if self.likeness is None else self.likeness.sides,
            "prompt": ask.prompt is not None,
            "prompted": ask.prompted and ask.prompt is not None,
        }

    def _logits(self) -> int:
        model, task = self.setup.model, self.setup.task
        assert isinstance(task, Classification)
        with frozen_eval(model), torch.no_grad():
            return task.logits(model, to_device(self.train.rows.batch([0]), placement(model)[0])).shape[-1]

    # --- what a question is about -----------------------------------------------------------------------

    def keep(self, content: bytes) -> dict[str, Any]:
        """A picture that was sent, for questions about it."""
        image = decode_picture(content)
        digest = hashlib.blake2b(content, digest_size=12).hexdigest()
        with self._lock:  # several may be sent at once
            self._pictures[digest] = image
            self._pictures.move_to_end(digest)
            while len(self._pictures) > PICTURES:
                self._pictures.popitem(last=False)
        return {"picture": digest, "width": image.size[0], "height": image.size[1]}

    def build(self, question: Question, method: Method, job: BackgroundJob) -> ExplorerQuery:
        """The features of a question. Of a text in several parts, their mean."""
        journey = isinstance(method, JourneyTRAK)
        followed = journey and question.kind == "prompt"
        key = f"{question.key} {followed}"
        found = self._asked.get(key)
        if found is None:
            rows, notes = self._rows(question, journey, job)
            rows, header = self._header(question, rows, notes)
            job.tell("computing features")
            features = self.index.features(rows)
            digests = list(features.digests)
            if len(rows) > 1:
                header.notes.append(f"It was cut into {len(rows)} parts: scores are of their mean.")
            found = ExplorerQuery(header, features.mean(), digests, rows, key, followed)
            self._asked[key] = found
            while len(self._asked) > HELD:
                self._asked.popitem(last=False)
        self._asked.move_to_end(key)
        method.check_query(found.rows[0])
        return found

    def recent(self, method: Method, but: Collection[tuple[str, int]] = ()) -> list[ExplorerQuery]:
        """What was asked about as the method asks, in its order, `but` for these examples under their own label."""
        journey, recent = isinstance(method, JourneyTRAK), []
        for query in list(self._asked.values()):
            header, question = query.header, query.header.question or {}
            own = (question.get("kind"), question.get("at")) in but and header.label == header.own
            if query.journey == journey and not own:
                recent.append(query)
        return recent

    def example(self, at: int) -> QueryHeader:
        """A training example, as what is asked about."""
        item = self.train.item(at)
        name, role = f"training example {item.name}", "training example"
        return QueryHeader(name, figure(item, role), own=class_number(self.setup.task, self.train.rows, at))

    def _class_of(self, example: Any) -> int | None:
        return class_number(self.setup.task, self._as_rows([example]))

    def _rows(self, question: Question, journey: bool, job: BackgroundJob) -> tuple[Rows, list[str]]:
        kind, ask = question.kind, self.setup.ask
        if kind in STORED:
            some = self._stored(kind)
            return self._as_rows([some.rows[some.check(question.at)]]), []
        if kind == "text":
            if ask.text is None:
                raise UndeError(
                    "texts cannot be asked about here: give Setup(ask=Ask(text=...)), a function that makes queries "
                    "of a text"
                )
            return self._as_rows(ask.text(question.text or "")), []
        if kind == "picture":
            return self._pictured(question)
        if ask.prompt is None:
            raise UndeError(
                "nothing is generated here: give Setup(ask=Ask(prompt=...)), a function that makes queries of a prompt"
            )
        tell = partial(job.tell, "generating the image")
        tell()
        rows = self._as_rows(ask.prompt(question.text or "", question.seed, journey, tell))
        return rows, [f"Generated with seed {question.seed}."]

    def _stored(self, kind: str) -> Catalogue:
        some = self.train if kind == "train" else self.roles.get(kind)
        if some is None:
            raise UndeError(f"this setup has no {kind}_queries: set Setup(..., {kind}_queries=...)")
        return some

    def _pictured(self, question: Question) -> tuple[Rows, list[str]]:
        image = self._pictures.get(question.picture or "")
        if image is None:
            raise UndeError("this picture is not held any more: choose or drop the file again")
        if self.setup.ask.picture is not None:
            rows = self._as_rows(self.setup.ask.picture(image, question.text or ""))
            seen = as_example(self.setup, rows[0], 0).image
            changed = seen is not None and seen.ndim == 3 and seen.shape[-1:-3:-1] != image.size
            return rows, [
                f"The picture was resized from {image.size[0]} × {image.size[1]}."
            ] if changed else []
        if self.likeness is None:
            raise UndeError(
                "pictures cannot be asked about here, as training examples are not a picture and a label: give "
                "Setup(ask=Ask(picture=...)), a function that makes queries of a picture"
            )
        example, notes = self.likeness.fit(image)
        if self.classifies:
            example = with_label(example, 0, self._class_of)  # whatever it is: the label asked about follows
        return self._as_rows([example]), notes

    def _as_rows(self, data: Any) -> Rows:
        return Rows(data, self.collate)

    def _header(self, question: Question, rows: Rows, notes: list[str]) -> tuple[Rows, QueryHeader]:
        """How the question is shown, and its rows under the label that is asked about."""
        item = self._item(question, rows)
        header = QueryHeader(f"{item.name}", figure(item, "query"), notes)
        header.question = question.as_json
        if not self.classifies or self.classes is None:
            if question.label is not None:
                raise UndeError("there is no label to ask about: the task is no classification")
            return rows, header
        if question.label is not None and question.label >= len(self.classes):
            raise UndeError(f"unknown label {question.label}: expected 0 to {len(self.classes) - 1}")
        found = predictions(self.setup, rows)
        header.predicted = None if found is None else found[0]
        header.own = self._class_of(rows[0]) if question.kind != "picture" else None
        header.label = next(x for x in (question.label, header.own, header.predicted, 0) if x is not None)
        if header.label != header.own:
            rows = self._as_rows(
                [with_label(rows[i], header.label, self._class_of) for i in range(len(rows))]
            )
        return rows, header

    def _item(self, question: Question, rows: Rows) -> Item:
        if question.kind in STORED:
            item = self._stored(question.kind).item(question.at)
            what = {"eval": "held-out query", "learn": "query for learning", "train": "training example"}
            return replace(item, id=f"{what[question.kind]} {item.name}")
        name = f"your {question.kind}"
        if question.kind == "text":
            return Item(name, text=question.text)
        return replace(as_example(self.setup, rows[0], name), label=None)


def concatenate(some: Sequence[QueryFeatures]) -> QueryFeatures:
    """Several sets of queries as one."""
    return QueryFeatures(
        some[0].index,
        torch.cat([f.features for f in some], 1),
        torch.cat([f.loss for f in some], 1),
        [d for f in some for d in f.digests],
    )


def subtract_means(plus: Sequence[ExplorerQuery], minus: Sequence[ExplorerQuery]) -> QueryFeatures:
    """The mean of some, less the mean of others."""
    first, rest = ([a.features for a in side if a.features is not None] for side in (plus, minus))
    made = concatenate(first).mean()
    return made - concatenate(rest).mean() if rest else made


LONGEST = 100_000  # characters of a text
MANY = 64  # questions in a set
STORED = ("eval", "learn", "train")  # examples of the setup, by position
TYPED = ("text", "picture", "prompt")
KINDS = STORED + TYPED


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
    def read(cls, body: Any) -> Question:
        """From JSON of the page, or of an address that somebody has typed."""
        if not isinstance(body, Mapping) or body.get("kind") not in KINDS:
            kind = body.get("kind") if isinstance(body, Mapping) else body
            raise unknown("kind of question", str(kind)[:40], KINDS)
        kind, at, text = body["kind"], body.get("at"), body.get("text")
        if kind in STORED and not _whole(at):
            raise UndeError(f"which {kind} example? Expected a position, not {str(at)[:40]!r}")
        if kind == "text" and (not isinstance(text, str) or not text.strip()):
            raise UndeError("nothing was asked: type a text")
        if text is not None and (not isinstance(text, str) or len(text) > LONGEST):
            raise UndeError(f"the text is too long: expected at most {LONGEST:,} characters")
        if kind == "picture" and not isinstance(body.get("picture"), str):
            raise UndeError("no picture was given: choose or drop a PNG or JPEG file")
        seed, label = body.get("seed", 0), body.get("label")
        if not _whole(seed) or seed >= 2**63:
            raise UndeError(f"a seed of {str(seed)[:40]!r}: expected a whole number from 0 on")
        if label is not None and not _whole(label):
            raise UndeError(f"unknown label {str(label)[:40]!r}: expected the number of a class")
        if kind in STORED:
            return cls(kind, at=at, label=label)
        return cls(kind, None, text or None, body["picture"][:64] if kind == "picture" else None, seed, label)

    @property
    def as_json(self) -> dict[str, Any]:
        """As the page would say it."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    @property
    def key(self) -> str:
        return json.dumps(self.as_json, sort_keys=True)


@dataclass(frozen=True)
class Inquiry:
    """The mean of some questions, less the mean of others; under a method and a damping."""

    plus: tuple[Question, ...]
    minus: tuple[Question, ...] = ()
    method: str | None = None
    damping: float | None = None

    @classmethod
    def read(cls, body: Any) -> Inquiry:
        if not isinstance(body, Mapping):
            raise UndeError("a question is a JSON object")
        sides = [body.get(side, []) for side in ("plus", "minus")]
        if any(not isinstance(some, list) or len(some) > MANY for some in sides):
            raise UndeError(f"a set of questions: expected a list of at most {MANY}")
        if not sides[0]:
            raise UndeError("nothing was asked: choose a query, or type one")
        plus, minus = (tuple(map(Question.read, some)) for some in sides)
        return cls(plus, minus, *read_method(body))

    @property
    def key(self) -> str:
        content = [[q.key for q in self.plus], [q.key for q in self.minus], self.method, self.damping]
        return hashlib.blake2b(json.dumps(content).encode(), digest_size=12).hexdigest()


def read_method(body: Mapping[str, Any]) -> tuple[str | None, float | None]:
    method, damping = body.get("method"), body.get("damping")
    if method is not None and not isinstance(method, str):
        raise UndeError(f"a method of {str(method)[:40]!r}: expected a name")
    if damping is not None:
        if not isinstance(damping, (int, float)) or isinstance(damping, bool) or not 0 <= damping <= 1e6:
            raise UndeError(f"damping {str(damping)[:40]!r}: expected a number from 0 to 1,000,000")
        damping = float(damping)
    return method, damping


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
