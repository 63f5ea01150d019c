"""Bits flipped, ends cut off, blocks zeroed, files swapped, in every kind of file."""

from __future__ import annotations

import io
import random
import shutil
from collections.abc import Callable
from contextlib import redirect_stderr
from pathlib import Path

from torch import Tensor

from benchmarks.faults import world
from benchmarks.faults.trial import CLEAR, LOST, RAW, WRONG, Tally, tried
from unde import UndeError, Weights
from unde.evaluate import Bank
from unde.index.verify import verify
from unde.integrations.source import ModelSource, trusted_target
from unde.store import layout

CATEGORY = "damaged files"
RESTORED = 12  # one in so many trials also follows the advice, to see whether it restores what was damaged


def damaged(content: bytes, chance: random.Random) -> bytes:
    """Another content, most often one bit of it."""
    out, what = bytearray(content), chance.random()
    if not out or what < 0.02:
        return bytes(out) + bytes(chance.randrange(1, 50))
    at = chance.randrange(len(out))
    if what < 0.75:
        out[at] ^= 1 << chance.randrange(8)
    elif what < 0.9:
        del out[at:]
    elif what < 0.95:
        out[at : at + 64] = bytes(min(64, len(out) - at))
    else:
        out[at : at + 8] = chance.randbytes(min(8, len(out) - at))
    return bytes(out)


class DamagedIndex:
    """One index that is damaged, asked, and put back as it was, again and again."""

    def __init__(self, folder: Path, kind: world.Kind) -> None:
        self.folder, self.kind = folder, kind
        self.want = kind.whole(folder)
        self.target = trusted_target(folder)
        self.files = world.everything(folder)
        self.content = world.content(folder)

    def trial(self, chance: random.Random, advice: bool) -> tuple[str, str, str]:
        """Which file, what came of it, and why."""
        name, new = self._chosen(chance)
        for changed, content in new.items():
            (self.folder / changed).write_bytes(content)
        outcome, why = tried(lambda: self._right(name))
        if advice and outcome not in (RAW, WRONG):
            outcome, why = self._restored(name, outcome, why)
        world.restore(self.folder, self.files)
        return name, outcome, why

    def _chosen(self, chance: random.Random) -> tuple[str, dict[str, bytes]]:
        kinds: dict[str, list[str]] = {}
        for name in self.files:
            kinds.setdefault("/".join(p for p in name.split("/")[:-1]) or name, []).append(name)
        name = chance.choice(kinds[chance.choice(sorted(kinds))])
        others = [n for n in self.files if n != name and Path(n).suffix == Path(name).suffix]
        if others and chance.random() < 0.03:
            other = chance.choice(others)
            return name, {name: self.files[other], other: self.files[name]}
        return name, {name: damaged(self.files[name], chance)}

    def _right(self, name: str) -> bool:
        with redirect_stderr(io.StringIO()):
            if name == layout.SOURCE:
                return trusted_target(self.folder) == self.target and ModelSource().options == {}
            return world.same(self.kind.asked(self.folder), self.want)

    def _restored(self, name: str, outcome: str, why: str) -> tuple[str, str]:
        """Whether `verify` sees what is wrong, and what it advises brings back every byte."""
        try:
            found = verify(self.folder)
            if outcome == CLEAR and found and not found.unfinished:
                return WRONG, f"{name}: {why}, and verify finds nothing"
            for problem in found.problems:
                path = self.folder / problem.name
                if path.is_dir():
                    shutil.rmtree(path)
                else:
                    path.unlink(missing_ok=True)
            self.kind.build(self.folder)
            ModelSource(target="project:make").save(self.folder)
            right = world.same(self.kind.asked(self.folder), self.want)
            whole = world.content(self.folder) == self.content or not found.problems  # else it did no harm
            if not right or not whole or not verify(self.folder):
                return LOST, f"{name}: {why}"
        except (Exception, UndeError) as e:
            return LOST, f"{name}: {why}; the advice fails: {type(e).__name__}: {e}"
        return outcome, why


class DamagedFile:
    """One file that is read by itself: a finished bank, weights."""

    def __init__(self, path: Path, read: Callable[[], dict[str, Tensor]]) -> None:
        self.path, self.read, self.whole, self.want = path, read, path.read_bytes(), read()

    def trial(self, chance: random.Random, advice: bool) -> tuple[str, str, str]:
        self.path.write_bytes(damaged(self.whole, chance))
        outcome, why = tried(lambda: world.same(self.read(), self.want))
        self.path.write_bytes(self.whole)
        return self.path.name, outcome, why


class DamagedParts:
    """A bank that is not finished: what is damaged is trained again, or the advice is followed."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "bank.npz"
        self.want = world.arrays(world.run_bank(folder / "whole.npz"))
        self._begin()
        self.files = world.everything(self.parts)

    @property
    def parts(self) -> Path:
        return self.path.with_name("bank.npz.parts")

    def _begin(self) -> None:
        def stop(indices: object, seed: int) -> Tensor:
            if len(list(self.parts.glob("model-*"))) == 4:
                raise RuntimeError("stopped")
            return world.train(indices, seed)  # ty: ignore[invalid-argument-type]

        try:
            world.run_bank(self.path, stop)
        except UndeError:
            return
        raise AssertionError("the bank was finished")

    def trial(self, chance: random.Random, advice: bool) -> tuple[str, str, str]:
        name = chance.choice(sorted(self.files))
        (self.parts / name).write_bytes(damaged(self.files[name], chance))
        outcome, why = tried(lambda: world.same(world.arrays(world.run_bank(self.path)), self.want))
        if outcome == CLEAR:  # the plan: delete it and go on
            (self.parts / name).unlink(missing_ok=True)
            again, more = tried(lambda: world.same(world.arrays(world.run_bank(self.path)), self.want))
            if again != "right result":
                outcome, why = LOST, f"{why}; then {again} {more}"
        self.path.unlink(missing_ok=True)
        world.restore(self.parts, self.files)
        return name, outcome, why


def run(tally: Tally, folder: Path, chance: random.Random, count: int) -> None:
    """As many in each kind of index, fewer in what has fewer kinds of files."""
    bank, w = folder / "finished.npz", folder / "w.json"
    world.run_bank(bank)
    world.weights().save(w)
    victims = [DamagedIndex(folder / kind.name, kind) for kind in world.KINDS]
    others = [
        DamagedFile(bank, lambda: world.arrays(Bank.open(bank))),
        DamagedFile(w, lambda: world.held(Weights.load(w))),
        DamagedParts(folder),
    ]
    shares = [0.3, 0.2, 0.2, 0.15, 0.15]
    for victim, share in zip([*victims, *others], shares, strict=True):
        for number in range(round(count * share)):
            name, outcome, why = victim.trial(chance, number % RESTORED == 0)
            tally.note(CATEGORY, outcome, f"{type(victim).__name__} {name}: {why}")
