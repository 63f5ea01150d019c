"""Index: the features of a training set on disk; build, open and change it. Its base classes answer questions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from unde import console, devices
from unde.checkpoints import Checkpoint
from unde.data import Collate, Rows, choose_collate, parse_bytes
from unde.default_device import host_default
from unde.errors import UndeError
from unde.gradients import adam_preconditioner
from unde.groups import Groups, trainable, unwrap_compiled
from unde.index import builder, segments, updates
from unde.index.builder import BuildSettings
from unde.index.choice import choose
from unde.index.query_api import QueryableIndex
from unde.index.reader import parse_ids
from unde.index.sizes import IndexSizes
from unde.index.state import IndexState, check_inputs, open_store
from unde.methods import Method
from unde.parallel import Executor, close_workers, get_executor
from unde.parallel.model_transport import BuildInputs
from unde.setup import Recipe
from unde.store.manifest import Manifest
from unde.store.remote import StorePath, place
from unde.tasks.base import Task, check_task

if TYPE_CHECKING:
    from unde.plan import Plan


@host_default
class Index(QueryableIndex):
    """The features of a training set on disk. Make one with `Index.build` or `Index.open`."""

    # --- building and opening -------------------------------------------------------------------------------------

    @classmethod
    def build(
        cls,
        model: nn.Module,
        task: Task,
        train_data: Any = None,
        path: str | StorePath | None = None,
        *,
        method: str | Method = "auto",
        projection: str = "auto",
        groups: Groups | str | Mapping[str, str] = "layer",
        batch_size: int | None = None,
        checkpoints: Sequence[Checkpoint] | None = None,
        checkpoint_weights: Sequence[float] | None = None,
        exclude: Sequence[str] = (),
        collate: Collate | None = None,
        num_workers: int = 0,
        device: str | torch.device | None = None,
        device_memory: int | str | None = None,
        store_dtype: str = "auto",
        ids: Sequence[Any] | None = None,
        disk: int | str = "20GB",
        memory: int | str = "2GB",
        seed: int = 0,
        on_bad: str = "error",
        second_moments: Any = None,
        executor: str | Executor = "serial",
        threads: int | None = None,
        recipe: str | Recipe | None = None,
        overwrite: bool = False,
        progress: bool = True,
    ) -> Index:
        """Compute the features of a training set and store them; resume an index that was begun in `path`.

        Args:
            model: The trained model, a PyTorch module.
            task: What the model is trained for: one of `unde.tasks`, or a `Task` of your own.
            train_data: The training examples: a data set, a loader, a list, or a tuple or dict of tensors.
            path: A folder, or a URL such as s3://bucket/index.
            method: The method or its name; it decides what is stored. "auto": TRAK for models with up to 5,000
                parameters and for diffusion models, EKFAC for others.
            projection: The features: "none" for whole gradients, "factored(4)", "kron(16)", … "auto": that of the
                method, else the most accurate ones that fit `disk` and `memory`.
            groups: The groups of parameters that scores are resolved by: "layer", "block", …, or {pattern: group}.
            batch_size: Examples in a pass; by default `memory` and what is fast decide. The number is recorded.
            checkpoints: State dicts or .safetensors files, of one training or of independently trained models; scores
                are means over them. None: the model as it is.
            checkpoint_weights: η_c of each checkpoint (learning rates for TracInCP); equal by default.
            exclude: Regular expressions of parameters to leave out.
            collate: Puts examples into a batch; by default that of the loader or the task.
            num_workers: Processes that read the data.
            device: Where the model runs, during the build and afterwards; it is moved there. By default where it is.
            device_memory: The memory budget on that device beside the weights, such as "20GB"; by default 80 % of what
                is free there. Workers on one device share it. On the CPU `memory` is the budget of everything.
            store_dtype: "float32", "float16", "int8", or "auto": float32 up to 256 MiB, int8 beyond.
            ids: The user's ids of the examples; by default those in `train_data.ids`, which texts have.
            disk: The budget in bytes that projection="auto" keeps to, such as "20GB".
            memory: The memory budget of the host, such as "2GB".
            seed: Seeds the random projection.
            on_bad: What to do about NaN gradients: "error", or "skip" to leave the example out and record it.
            second_moments: An Adam-like optimizer, its state_dict(), or {parameter: v}: scores are in its metric
                v^−1/2, gradients are divided by v^1/4 on each side. "gradients" takes v from some training examples.
            executor: "serial", "processes:4", "ray", "array" (one of many workers, each with its share; the same call
                without it finishes the index), or an Executor. The bytes do not depend on it.
            threads: Threads of torch for each job; the last bits of features depend on their number.
            recipe: A function that returns the same `Setup`, as "my_project.setup:make", by which other processes make
                the model. Models of transformers and diffusers need none.
            overwrite: Whether to replace an index in `path` that was made from other inputs or settings, with its
                calibration; the same index is resumed.
            progress: Whether to show what is built, and a bar.

        Returns:
            The index, open with its model, task and data.

        Raises:
            UndeError: An option is wrong, the folder holds another index, the model cannot run on an example, or the
                data reads differently each time.

        >>> index = unde.Index.build(model, unde.tasks.Classification(), data, "runs/index")  # doctest: +SKIP
        """
        check_task(task, "Index.build(model, task, train_data, path)")
        if path is None:
            raise UndeError(
                "path is missing: give the folder of the index, Index.build(model, task, train_data, path)"
            )
        rows = Rows(train_data, collate or choose_collate(task.collate, train_data))
        folder, runs, model = place(path), get_executor(executor, threads=threads), unwrap_compiled(model)
        if overwrite and not runs.exclusive:
            raise UndeError(
                "overwrite=True (--overwrite) with an array: its workers would delete the shards of one another. "
                f"Delete {folder} before the jobs start"
            )
        devices.move(model, device)
        inputs = BuildInputs(
            model, task, rows, checkpoints, parse_recipe(recipe), None if device is None else str(device)
        )
        count, names = len(checkpoints or ()) or 1, trainable(model, exclude)
        sizes = IndexSizes(
            model, task, rows, names, len(rows), count, store_dtype=store_dtype, memory=parse_bytes(memory)
        )
        choice = choose(
            method,
            projection,
            sizes,
            parse_bytes(disk, "disk"),
            weighed=second_moments is not None,
            before=None if overwrite else builder.recorded_method(folder),
            inputs=inputs,
            folder=folder,
            alone=runs.exclusive,
        )
        if progress:
            for line in choice.lines():
                console.line(line)
        with close_workers(executor, runs):
            if isinstance(second_moments, str) and second_moments == adam_preconditioner.GRADIENTS:
                second_moments = adam_preconditioner.of_gradients(model, task, rows, names)
            settings = BuildSettings(
                groups=groups,
                exclude=exclude,
                store_dtype=store_dtype,
                scoring_method=choice.method,
                seed=seed,
                on_bad=on_bad,
                checkpoint_weights=checkpoint_weights,
                ids=parse_ids(rows, ids),
                memory=parse_bytes(memory),
                device_memory=None if device_memory is None else parse_bytes(device_memory, "device_memory"),
                threads=threads or runs.threads,
                second_moments=second_moments,
                batch_size=batch_size,
                workers=num_workers,
                overwrite=overwrite,
            )
            settings.check(inputs, choice.method)  # before a folder is made
            return cls(builder.build(folder, inputs, choice.method, settings, runs, progress))

    @classmethod
    def finish(
        cls, path: str | StorePath, model: nn.Module, task: Task, train_data: Any, **options: Any
    ) -> Index:
        """Finish an index that was begun, with its recorded settings.

        Args:
            path: Its folder or URL.
            model: The model that it was begun with.
            task: The task that it was begun with.
            train_data: The data that it was begun with.
            options: Further inputs of `build` (`checkpoints`, `collate`, `ids`, …), and who computes.

        Returns:
            The finished index.

        Raises:
            UndeError: The folder holds no index, or one that was begun with other inputs.

        >>> index = unde.Index.finish("runs/index", model, task, data)  # doctest: +SKIP
        """
        m = Manifest.read(place(path))
        return cls.build(model, task, train_data, path, **(builder.recorded_options(m, model) | options))

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
        device_memory: int | str | None = None,
        verify: bool = True,
        executor: str | Executor = "serial",
        threads: int | None = None,
        recipe: str | Recipe | None = None,
        device: str | torch.device | None = None,
    ) -> Index:
        """Open an index on disk, after checking that it is whole and was made from the given inputs.

        Args:
            path: Its folder or URL.
            model: The model; without model and task the index scores stored features of queries only.
            task: The task. One of another name, version or settings is refused; with model and data, features of a few
                examples under a user's own task are compared with those in the index.
            train_data: The training data, compared with what was indexed (all of it if that takes seconds).
            groups: The groups that the index must have.
            checkpoints: As in `build`.
            collate: As in `build`.
            memory: The memory budget of the host, such as "2GB".
            device_memory: The memory budget on the device, as in `build`.
            verify: Whether to compare checksums.
            executor: Who computes, as in `build`.
            threads: As in `build`.
            recipe: As in `build`.
            device: Where questions are computed, and the model is moved to; by default where the model is, and the CPU
                without a model. Another device than that of the build is noted.

        Returns:
            The index.

        Raises:
            UndeError: The index is not finished or damaged, or was made from other inputs; the message names them.

        >>> index = unde.Index.open("runs/index", model=model, task=task, train_data=data)  # doctest: +SKIP
        """
        runs = get_executor(executor, threads=threads)
        if not runs.exclusive:
            raise UndeError(f"{runs} does a share of a build: ask an index with another executor")
        model = None if model is None else unwrap_compiled(model)
        if model is not None:
            devices.move(model, device)
        state = IndexState(
            open_store(place(path), parse_bytes(memory), verify),
            model=model,
            task=task,
            checkpoints=checkpoints,
            collate=collate,
            executor=runs,
            recipe=parse_recipe(recipe),
            device=None if device is None else str(device),
            device_memory=None if device_memory is None else parse_bytes(device_memory, "device_memory"),
        )
        return cls(check_inputs(state, train_data, groups))

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
        builder.add_fisher(self._state, kind, progress)

    # --- changing it ------------------------------------------------------------------------------------

    def append(self, more_data: Any, ids: Sequence[Any] | None = None, *, progress: bool = True) -> None:
        """Add training examples: compute their features as one more segment of the index.

        Kernels are fitted again from stored features when they are next needed. Whitening stays that of the
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
        held[self._state.stored.find_digests(rows.digests())] = True
        return held

    def remove(self, ids: Sequence[Any] | None = None, *, indices: Sequence[int] | None = None) -> None:
        """Remove training examples and erase their bytes from the folder; those behind them move up.

        Nothing is computed again, but for the covariances of EKFAC, which need the model and the data. For copies that
        this cannot reach see docs/changing-indexes.md.

        Args:
            ids: Ids of the examples, or names of documents: "doc-17" stands for its parts "doc-17:1", "doc-17:2", …
                In an index without ids, positions.
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


def parse_recipe(recipe: str | Recipe | None) -> Recipe | None:
    return Recipe(recipe) if isinstance(recipe, str) else recipe
