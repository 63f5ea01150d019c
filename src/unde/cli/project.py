"""What a command works on: a setup, its index, its weights, and its three disjoint sets of data."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from unde import console, methods
from unde.cli.options import ModelOptions
from unde.data import Rows
from unde.devices import move
from unde.diffusion import Samples
from unde.errors import UndeError, unknown
from unde.index import Index
from unde.integrations.diffusers import query_columns
from unde.integrations.documents import Texts
from unde.integrations.pictures import ImageFormat, decode_picture, with_label
from unde.integrations.source import ModelSource
from unde.integrations.sources import source_names
from unde.integrations.spans import span_queries
from unde.methods import JourneyTRAK, Method
from unde.parallel import SERIAL, Executor
from unde.scoring import GroupScores
from unde.scoring.base import Names
from unde.scoring.data_splits import refuse_shared, shared
from unde.setup import Recipe
from unde.store.files import CannotWrite
from unde.store.layout import QUERIES
from unde.store.remote import StorePath, Unreachable, exists
from unde.tasks import Classification, Diffusion
from unde.ui.report.example_view import label_predictions
from unde.weights import Weights


class Project:
    """The setup of a command line: MODULE:FUNCTION, or a Hugging Face model and texts.

    Args:
        model: The options of the model.
        index: Where options of the model that are not named are looked up.
        learn: Texts of queries to learn from; for Hugging Face models, whose setup has none.
        evaluate: Texts of queries to ask about, likewise.
        query_field: The field of the text in files of queries.
        span: Words of the queries to evaluate; the loss is on these alone.
    """

    def __init__(
        self,
        model: ModelOptions,
        *,
        index: StorePath | None = None,
        learn: Texts | None = None,
        evaluate: Texts | None = None,
        query_field: str | None = None,
        span: str | None = None,
    ) -> None:
        target, source = model.target, model.source()
        texts = source.text_options
        if target is not None and texts:
            raise UndeError(
                f"{target} and --{'hf-model' if 'model' in texts else next(iter(texts)).replace('_', '-')}: give "
                "MODULE:FUNCTION, or --hf-model with --data, not both"
            )
        if target is not None and source.trust_remote_code:
            raise UndeError(f"--trust-remote-code goes with --hf-model: the code of {target} is run anyway")
        self.source: ModelSource | None = None
        if target is not None:
            if learn is not None or evaluate is not None:
                raise UndeError(
                    f"queries as texts go with --hf-model: {target} brings its own, learn_queries and eval_queries"
                )
            self.name, self.setup = target, Recipe(target).make()
        else:
            complete = source.complete(index)
            self.name, self.setup = str(complete.model), complete.setup(learn, evaluate, query_field)
            self.source = replace(
                complete, seq_len=getattr(self.setup.train_data, "length", complete.seq_len)
            )
        if span is not None and self.setup.eval_queries is not None:
            self.setup = replace(self.setup, eval_queries=span_queries(self.setup, span))
        self.checkpoints, self.rates = source.checkpoints_of(self.setup.model, index)
        self.shares: Sequence[float] | None = None  # of checkpoints, for all methods
        if self.checkpoints is None and self.setup.checkpoints is not None:
            self.checkpoints, self.shares = list(self.setup.checkpoints), self.setup.checkpoint_weights
        # What an index keeps to be found again.
        self.memory = self.source or ModelSource(target=target, checkpoints=source.checkpoints)
        self.device, self.device_memory = model.device, model.device_memory
        if self.device is not None:
            move(self.setup.model, self.device)

    @property
    def recipe(self) -> Recipe:
        """How another process makes the same setup."""
        return Recipe(self.name) if self.source is None else self.source.recipe

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments of everything that builds or opens an index, or scores without one."""
        return {
            "checkpoints": self.checkpoints,
            "collate": self.setup.collate,
            "recipe": self.recipe,
            "device": self.device,
            "device_memory": self.device_memory,
        }

    def index(
        self, path: StorePath, executor: Executor = SERIAL, whole: bool = True, uncalibrated: bool = False
    ) -> Index:
        """Open an index; `whole` says that the training data of the setup are those of the index."""
        s = self.setup
        made = Index.open(
            path,
            model=s.model,
            task=s.task,
            train_data=s.train_data if whole else None,
            executor=executor,
            **self.arguments,
        )
        if whole and made.manifest.changes is not None:  # positions are those of the index
            s.train_data, s.ids = made.train_data, made.ids
        return made.uncalibrated() if uncalibrated else made

    def sources(self, column: str, ids: Sequence[Any] | None) -> Names:
        """The source of each training example: its document, label, or a column of the data."""
        return source_names(self.setup, column, ids, None if self.source is None else self.source.data)

    def queries(self, role: str) -> Rows:
        if role not in ("learn", "eval"):
            raise unknown("queries", role, ("learn", "eval"))
        data = self.setup.learn_queries if role == "learn" else self.setup.eval_queries
        if data is None and self.source is not None:
            raise UndeError("no queries: give texts to ask about (--queries FILE.jsonl)")
        if data is None:
            raise UndeError(f"{self.name} gives no {role}_queries: set Setup(..., {role}_queries=...)")
        return self.setup.rows(data)

    def disjoint_queries(self, role: str) -> Rows:
        """The queries of a role, after checking that the roles share no example."""
        if self.source is not None and self.setup.eval_queries is None and self.setup.learn_queries is None:
            raise UndeError("no queries: give texts that are not in the training data (--queries FILE.jsonl)")
        queries, other = self.queries(role), "eval" if role == "learn" else "learn"
        name_of_role = f"{role}_queries" if self.source is None else "queries"
        digests = queries.digests()
        rest = self.setup.eval_queries if role == "learn" else self.setup.learn_queries
        for name, data in (("the training data", self.setup.train_data), (f"{other}_queries", rest)):
            found = shared(digests, Rows(data).digests()) if data is not None else []
            refuse_shared(len({digests[i] for i in found}), name_of_role, name)
        return queries

    def names(self, role: str) -> list[str] | None:
        """The ids of the queries of a file."""
        return self.queries(role).data.ids if self.source is not None else None


def cached_scores(index: Index, queries: Rows, method: str | None) -> GroupScores:
    """Score queries; their features are cached in the index for the next command."""
    key = hashlib.blake2b("".join(queries.digests()).encode(), digest_size=8).hexdigest()
    path = index.folder / QUERIES / f"{key}.safetensors"
    features = None
    if exists(path):
        try:
            features = index.features(queries, path)
        except Unreachable:
            raise
        except UndeError as e:
            console.note(f"{e}; computed again")
    if features is None:
        features = index.features(queries)
        try:
            features.save(path)
        except (CannotWrite, Unreachable) as e:  # an index that may be read, and not written
            console.note(f"features of these queries are not cached for the next command ({e.strerror})")
    return index.score(features, method)


def load_weights(path: StorePath, groups: Sequence[str], digests: Sequence[str] = ()) -> Weights:
    """Load weights of these groups; queries that they were learned on are refused by their digests."""
    if path.is_dir():
        raise UndeError(f"{path} is a folder: expected a file of weights, written by `unde learn`")
    weights = Weights.load(path)
    try:
        weights.aligned_to(groups)
    except UndeError as e:
        raise UndeError(f"{path}: {e}") from None
    seen = shared(digests, weights.query_digests)
    if seen:
        raise UndeError(
            f"{path} was learned on {len(seen)} of these queries: attribute and evaluate other ones"
        )
    return weights


@dataclass(frozen=True)
class QuerySelection:
    """Queries, their names, and their positions among the setup's eval_queries, if they are some of them."""

    rows: Rows
    names: Sequence[int | str] | None = None
    held_out: Sequence[int] | None = None
    labelled: bool = True  # false: labels are predictions, the true ones are unknown

    def first(self, count: int) -> QuerySelection:
        """The first of them."""
        return self.some(range(min(count, len(self.rows))))

    def some(self, which: Sequence[int]) -> QuerySelection:
        rows = Rows([self.rows[q] for q in which], self.rows.collate)
        names = [q if self.names is None else self.names[q] for q in which]
        held_out = None if self.held_out is None else [self.held_out[q] for q in which]
        return QuerySelection(rows, names, held_out, self.labelled)


def select_queries(
    project: Project, built: Method, method: str | None, query: Sequence[str], queries: str | None
) -> QuerySelection:
    """Select what `--query` and `--queries` name, or the eval_queries of the setup.

    `built` is the method of the index and `method` another to score with: Journey-TRAK wants trajectories.
    """
    if project.source is not None:
        rows = project.queries("eval")
        typed = bool(query) and queries is None
        if typed:
            return QuerySelection(rows, ["your text"] if len(rows) == 1 else project.names("eval"))
        selection = QuerySelection(rows, project.names("eval"))
    elif queries not in (None, "learn", "eval"):
        _use_samples(project, Path(queries).expanduser(), methods.on_index(method, built))
        selection = QuerySelection(project.queries("eval"))
    elif queries is None and query and not _positions(query):
        return _from_text(project, query)
    else:
        rows = project.queries(queries or "eval")
        selection = QuerySelection(rows, held_out=None if queries == "learn" else range(len(rows)))
    return selection.some(_positions_in(query, len(selection.rows))) if query else selection


def _use_samples(project: Project, folder: Path, method: Method) -> None:
    """Make saved samples the eval_queries of the project, a diffusion model's."""
    if not isinstance(project.setup.task, Diffusion):
        raise UndeError(
            f"--queries {folder}: {project.name} brings its own queries, eval and learn. A folder of samples is for "
            "diffusion models, and a file of texts goes with --hf-model"
        )
    columns = query_columns(Samples.load(folder), isinstance(method, JourneyTRAK))
    project.setup = replace(project.setup, eval_queries=columns, contributors=None)


def _positions(query: Sequence[str]) -> bool:
    return all(text.isascii() and text.isdigit() for text in query)


def _positions_in(query: Sequence[str], count: int) -> list[int]:
    if not _positions(query):
        raise UndeError(f"--query {query[0]!r} with --queries: expected a number, which of them")
    which = [int(text) for text in query]
    beyond = next((n for n in which if n >= count), None)
    if beyond is not None:
        raise UndeError(f"--query {beyond}: there are {count} queries, numbered from 0 to {count - 1}")
    return which


def _from_text(project: Project, query: Sequence[str]) -> QuerySelection:
    """Read texts and image files as the setup does. Labels of images are unknown: they are the model's predictions."""
    setup = project.setup
    train = setup.rows(setup.train_data)
    files = [Path(text).expanduser() for text in query]
    pictured = [path.is_file() for path in files]
    if not all(pictured) and (setup.ask.text is None or any(pictured)):
        raise UndeError(
            f"--query {query[pictured.index(False)]!r} is no file: expected the file of an image, or a number, which "
            f"of the eval_queries of {project.name} to show. Texts go with --hf-model, or Setup(ask=Ask(text=...))"
        )
    if setup.ask.text is not None and not any(pictured):
        examples = [row for text in query for row in _rows(setup.ask.text(text))]
        one_each = len(examples) == len(query)
        names = ["your text"] if len(examples) == 1 else list(query) if one_each else None
        return QuerySelection(Rows(examples, train.collate), names, labelled=False)
    alike = None if setup.ask.picture is not None else ImageFormat.of(train)
    examples = [_read_image(project, text, path, alike) for text, path in zip(query, files)]
    rows = Rows(examples, train.collate)
    predictions = label_predictions(setup, rows) if setup.ask.picture is None else None
    if predictions is not None:
        pairs = zip(examples, predictions.predicted.tolist(), strict=True)
        rows = Rows([with_label(e, y) for e, y in pairs], train.collate)
    return QuerySelection(rows, [path.name for path in files], labelled=False)


def _read_image(project: Project, text: str, path: Path, alike: ImageFormat | None) -> Any:
    """Read the image in a file as one example."""
    setup = project.setup
    try:
        image = decode_picture(path.read_bytes())
        if setup.ask.picture is not None:
            return _rows(setup.ask.picture(image, ""))[0]
        if alike is None:
            raise UndeError(
                "training examples are not images (and a label), so it is not known how to read one. Put the image "
                "into the eval_queries of the setup, and ask by its number, or give Setup(ask=Ask(picture=...))"
            )
        example, notes = alike.fit(image)
    except UndeError as e:
        raise UndeError(f"--query {text}: {e}") from None
    for note in notes:
        console.note(f"{text}: {note}")
    return with_label(example, 0) if isinstance(setup.task, Classification) else example


def _rows(data: Any) -> list[Any]:
    rows = Rows(data)
    return [rows[i] for i in range(len(rows))]
