"""Index: the features of a training set on disk, made, opened and changed; `reader` has what can be asked of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from unde.checkpoints import Checkpoint
from unde.data import Collate, Rows, own_collate, parse_bytes
from unde.errors import UndeError
from unde.gradients import adam_preconditioner as moments
from unde.groups import Groups, trainable, unwrapped
from unde.index import builder as making
from unde.index import segments, updates
from unde.index.build_settings import checked, settle
from unde.index.query_api import QueryableIndex
from unde.index.state import IndexState
from unde.index.validation import read_ids
from unde.methods import Method
from unde.parallel import Executor, close_workers, get_executor
from unde.parallel.model_transport import BuildInputs
from unde.setup import Recipe
from unde.store.manifest import Manifest
from unde.store.remote import StorePath, place
from unde.tasks.base import Task

if TYPE_CHECKING:
    from unde.plan import Plan


class Index(QueryableIndex):
    """Make one with `Index.build` or `Index.open`."""

    # --- making one -------------------------------------------------------------------------------------

    @classmethod
    def build(
        cls,
        model: nn.Module,
        task: Task,
        train_data: Any,
        path: str | StorePath,
        *,
        method: str | Method = "trak",
        groups: Groups | str | Mapping[str, str] = "layer",
        batch_size: int | None = None,
        checkpoints: Sequence[Checkpoint] | None = None,
        checkpoint_weights: Sequence[float] | None = None,
        exclude: Sequence[str] = (),
        collate: Collate | None = None,
        num_workers: int = 0,
        device: str | torch.device | None = None,
        store_dtype: str = "auto",
        ids: Sequence[Any] | None = None,
        memory: int | str = "2GB",
        seed: int = 0,
        on_bad: str = "error",
        second_moments: Any = None,
        executor: str | Executor = "serial",
        threads: int | None = None,
        recipe: str | Recipe | None = None,
        progress: bool = True,
    ) -> Index:
        """Compute the features of `train_data`, or finish an index that was begun in `path`, a folder or a URL such as
        s3://bucket/idx.

        `checkpoints` are state dicts or .safetensors files; `checkpoint_weights` their η_c (learning rates
        for TracInCP; equal shares by default). `exclude` names parameters to leave out, by regular
        expressions. `on_bad` is what to do about NaN gradients: "error", or "skip" and record.
        `second_moments`, an Adam-like optimizer, its state_dict() or {parameter: v}, puts scores into its metric
        v^−1/2: gradients are divided by v^1/4 on each side. "gradients" takes v from some training examples. Several
        `checkpoints` may be those of one training, or an ensemble of models trained independently: scores are the mean
        of theirs.
        `store_dtype` is how features are stored: "float32", "float16", "bfloat16", "int8", "int4", "factored(1)", or
        "auto": float32 up to 256 MiB, int8 beyond. `memory` and what is fast decide how many examples go through the
        model at a time, which is recorded; a `batch_size` is understood and not needed.

        `executor` says who computes: "serial", "processes:4", "ray", "array" (one of many workers, each of which does
        its share; the index is whole when all have ended and `build` was called once more without it), or an Executor;
        with the same number of `threads` for each job the bytes are the same. Other processes make the model for
        themselves, by the `recipe`: a function that returns the same `Setup`, as "my_project.setup:make". Models of
        transformers and diffusers need none.
        """
        making.check_task(task)
        rows = Rows(train_data, collate or own_collate(task.collate, train_data))
        folder, runs, model = place(path), get_executor(executor, threads=threads), unwrapped(model)
        chosen = making.settled_method(
            method, BuildInputs(model, task, rows, checkpoints), folder, exclude, progress
        )
        making.check_options(chosen, on_bad, batch_size, store_dtype)
        ids = making.ids_for(rows, ids)
        budget = parse_bytes(memory)
        with making.on_device(model, device), close_workers(executor, runs):
            given = BuildInputs(
                model, task, rows, checkpoints, making.as_recipe(recipe), making.plainly(device)
            )
            if isinstance(second_moments, str) and second_moments == moments.GRADIENTS:
                second_moments = moments.of_gradients(model, task, rows, trainable(model, exclude))
            checked(given, chosen, groups, exclude, second_moments)  # before a folder is made
            settling = partial(
                settle,
                groups=groups,
                exclude=exclude,
                store_dtype=store_dtype,
                seen_by=chosen,
                seed=seed,
                on_bad=on_bad,
                checkpoint_weights=checkpoint_weights,
                ids=ids,
                second_moments=second_moments,
                memory=budget,
                workers=num_workers,
                each=threads or runs.threads,
                executor=runs,
            )
            writers = making.computed(folder, given, chosen, settling, runs, progress)
        return cls(making.opened(writers, budget, ids, runs))

    @classmethod
    def finish(
        cls, path: str | StorePath, model: nn.Module, task: Task, train_data: Any, **options: Any
    ) -> Index:
        """What is left of an index that was begun, with everything as it was settled then.

        `options` are those of `build` that say what is given (`checkpoints`, `collate`, `ids`, …) and who computes.
        """
        m = Manifest.read(place(path))
        return cls.build(model, task, train_data, path, **(making.recorded(m, model) | options))

    @classmethod
    def open(
        cls,
        path: str | StorePath,
        *,
        model: nn.Module | None = None,
        task: Task | None = None,
        train_data: Any = None,
        groups: Groups | None = None,
        checkpoints: Sequence[Checkpoint] | None = None,
        collate: Collate | None = None,
        memory: int | str = "2GB",
        verify: bool = True,
        executor: str | Executor = "serial",
        threads: int | None = None,
        recipe: str | Recipe | None = None,
        device: str | None = None,
    ) -> Index:
        """An index on disk, after checking that it is whole and was made from what is given here.

        Without `model` and `task` it can score stored query features only. `train_data` is compared with what
        was indexed (all of it if that takes seconds). `verify=False` skips the checksums. A task of another name,
        version or settings is refused; with model and `train_data`, a user's own task also if features of a few
        examples differ from those in the index. `executor` says who
        computes what is asked, as in `build`; other processes put the model on `device`.
        """
        runs = get_executor(executor, threads=threads)
        if not runs.exclusive:
            raise UndeError(f"{runs} does a share of a build: ask an index with another executor")
        at = IndexState(
            making.found(place(path), parse_bytes(memory), verify),
            model=None if model is None else unwrapped(model),
            task=task,
            checkpoints=checkpoints,
            collate=collate,
            executor=runs,
            recipe=making.as_recipe(recipe),
            device=device,
        )
        return cls(making.checked(at, train_data, groups))

    @property
    def fishers(self) -> tuple[str, ...]:
        """The values of `fisher` that methods can have on this index: "empirical", and what was built or added."""
        return self._state.stored.fishers

    def add_fisher(self, kind: str, *, progress: bool = True) -> None:
        """Compute the gradients that methods with `fisher=kind` need, beside those of the index.

        Args:
            kind: "sampled", one label drawn for each example, or "true", every label.
            progress: Whether to show a bar.

        Raises:
            UndeError: The index was opened without its model, task and data; it was changed since it was built; or the
                task has too many labels.

        >>> index.add_fisher("true")  # doctest: +SKIP
        >>> index.score(queries, unde.methods.TRAK(fisher="true"))  # doctest: +SKIP
        """
        making.add_fisher(self._state, kind, progress)

    # --- changing it ------------------------------------------------------------------------------------

    def append(self, more_data: Any, ids: Sequence[Any] | None = None, *, progress: bool = True) -> None:
        """Add training examples: compute their features as one more segment of the index.

        Kernels are fitted again from stored features when they are next needed. pca directions stay those of the
        examples that the index was built on. After a kill the index is unchanged, and the same call resumes.

        Args:
            more_data: Examples as in `build`.
            ids: Their ids, where the index has ids.
            progress: Whether to show a bar.

        Raises:
            UndeError: The index was opened without its model and task, the model has changed, or ids are taken.

        >>> index.append(more_data, ids=more_ids)  # doctest: +SKIP
        """
        self.__init__(updates.append(self._state, more_data, ids, progress))

    def holds(self, data: Any) -> Tensor:
        """(n,) bool: which examples are in the index already, by their content."""
        rows = Rows(data)
        held = torch.zeros(len(rows), dtype=torch.bool)
        held[self._state.stored.holding(rows.digests())] = True
        return held

    def remove(self, ids: Sequence[Any] | None = None, *, indices: Sequence[int] | None = None) -> None:
        """Remove training examples and erase their bytes from the folder; those behind them move up.

        Nothing is computed again, but for the covariances of EKFAC, which need the model and the data. For copies that
        this cannot reach see docs/changing-indexes.md.

        Args:
            ids: Ids of the examples; in an index without ids, their positions.
            indices: Positions of the examples, instead of ids.

        Raises:
            UndeError: An example is not in the index, or no example would be left.

        >>> index.remove(["doc-17", "doc-42"])  # doctest: +SKIP
        """
        self.__init__(updates.remove(self._state, ids, indices))

    @classmethod
    def merge(cls, indexes: Sequence[Index | str | StorePath], path: str | StorePath) -> Index:
        """Merge indexes into a new one, with their examples in the given order; the old ones stay as they are.

        Args:
            indexes: Indexes of the same weights, task, method, projection, seed, groups and precision.
            path: Folder or URL of the new index.

        Returns:
            The new index, opened without its model and task.

        Raises:
            UndeError: The indexes were not measured alike (the message names what differs), or share ids.

        >>> whole = unde.Index.merge(["runs/monday", "runs/tuesday"], "runs/all")  # doctest: +SKIP
        """
        segments.merge([i.folder if isinstance(i, Index) else place(i) for i in indexes], place(path))
        return cls.open(path)

    def repack(self, path: str | StorePath, store_dtype: str) -> Index:
        """Store the features in another precision, as a new index. Nothing is computed again.

        Args:
            path: Folder or URL of the new index.
            store_dtype: As in `build`.

        Returns:
            The new index, opened with all that this one was.

        >>> small = index.repack("runs/small", "int8")  # doctest: +SKIP
        """
        self._state.check_finished()
        segments.repack(self.folder, place(path), store_dtype)
        found = making.found(place(path), self.memory, verify=False)
        return Index(replace(self._state, stored=found, ids=read_ids(found.folder, found.manifest)))

    @staticmethod
    def plan(model: nn.Module, task: Task, train_data: Any = None, **options: Any) -> Plan:
        """Tell what `build` would take on disk, in memory and in minutes.

        Args:
            model: The trained model; on the meta device, only bytes on disk are told.
            task: What the model was trained on.
            train_data: The training data, or some of it: a few passes are timed.
            options: Those of `unde.plan.plan`: n_examples, workers, and most of `build`.

        Returns:
            The plan: `.disk`, `.memory`, `.minutes`; `print` shows it.

        >>> print(unde.Index.plan(model, task, data, method="logra"))  # doctest: +SKIP
        """
        from unde.plan import plan  # which imports modules of this package

        return plan(model, task, train_data, **options)
