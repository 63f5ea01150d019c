import errno
import json
import os

import pytest
import torch

from unde.errors import UndeError
from unde.weights import Weights


def example() -> Weights:
    values = torch.rand(7, generator=torch.Generator().manual_seed(0)) ** 4
    groups = [f"block.{i}" for i in range(6)] + ["Kopf – ü"]
    return Weights(values, groups, ["aa", "bb"], {"k": 10, "objective": {"curve": [0.1, 0.2]}})


def test_mean_is_one_and_ratios_stay():
    weights = Weights(torch.tensor([2.0, 6.0, 0.0]), ["a", "b", "c"])
    torch.testing.assert_close(weights.values, torch.tensor([0.75, 2.25, 0.0]))
    assert Weights.uniform([f"g{i}" for i in range(77)]).values.tolist() == [1.0] * 77
    for seed in range(200):  # to divide by a mean of 1 ± rounding would change a few of these
        values = torch.rand(2 + seed % 9, generator=torch.Generator().manual_seed(seed)) ** 4
        once = Weights(values, [f"g{i}" for i in range(len(values))])
        assert torch.equal(Weights(once.values, once.groups).values, once.values)


def test_file_reads_back_exactly(tmp_path):
    weights = example()
    weights.save(tmp_path / "w.json")
    loaded = Weights.load(tmp_path / "w.json")
    assert torch.equal(loaded.values, weights.values)
    assert loaded.groups == weights.groups
    assert loaded.query_digests == ["aa", "bb"]
    assert loaded.provenance == weights.provenance
    assert '"Kopf – ü": ' in (tmp_path / "w.json").read_text(encoding="utf-8")


def test_interrupted_save_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "w.json"
    example().save(path)
    before = path.read_bytes()

    def crash(source, target):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", crash)
    with pytest.raises(KeyboardInterrupt):
        Weights.uniform(["a"]).save(path)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["w.json"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "other"}, "does not hold weights"),
        ({"version": 2}, "version 2 .* reads version 1"),
        ({"weights": {"a": -1.0, "b": 2.0}}, "non-negative.*'a'"),
        ({"weights": {"a": float("nan"), "b": 2.0}}, "finite.*'a'"),
        ({"weights": {"a": float("inf"), "b": 2.0}}, "finite.*'a'"),
        ({"weights": {"a": 10**400, "b": 2.0}}, "damaged: int too large"),
        ({"weights": {"a": 0.0}}, "all are zero"),
        ({"weights": {}}, "at least one group"),
        ({"weights": {"a": "1"}}, "damaged"),
        ({"weights": [1.0]}, "damaged"),
        ({"query_digests": None}, "damaged"),
        ({"provenance": 3}, "damaged"),
    ],
)
def test_bad_files_are_refused(tmp_path, change, message):
    path = tmp_path / "w.json"
    Weights.uniform(["a", "b"]).save(path)
    content = json.loads(path.read_text()) | change
    del content["checksum"]
    path.write_text(json.dumps(content))
    with pytest.raises(UndeError, match=message) as caught:
        Weights.load(path)
    assert str(path) in str(caught.value)


def test_any_change_of_a_file_is_noticed(tmp_path):
    path = tmp_path / "w.json"
    weights = Weights(torch.tensor([0.5, 1.5]), ["a", "b"], ["aa"], {"k": 10, "by": {3: [float("nan")]}})
    weights.save(path)
    text = path.read_text()
    for before, after in (("1.5", "1.6"), ('"a"', '"c"'), ("10", "11"), ('"aa"', '"ab"'), ("NaN", "2.0")):
        path.write_text(text.replace(before, after, 1))
        with pytest.raises(UndeError, match="does not match its checksum"):
            Weights.load(path)
    content = json.loads(text)
    del content["checksum"]
    path.write_text(json.dumps(content))  # as releases before 0.2 wrote it
    assert torch.equal(Weights.load(path).values, weights.values)


@pytest.mark.parametrize("scale", [1e308, 5e307, 1e-300, 5e-324])
def test_numbers_at_the_ends_of_the_range_keep_their_ratios(scale):
    weights = Weights(torch.tensor([scale, scale, 0.0], dtype=torch.float64), ["a", "b", "c"])
    assert weights.values.tolist() == [1.5, 1.5, 0.0]


def test_paths_that_cannot_be_written_or_read_are_told(tmp_path, monkeypatch):
    for path in (tmp_path / "missing" / "w.json", tmp_path):
        with pytest.raises(UndeError, match=rf"cannot write weights to '{path}' \((No such file|Is a dir)"):
            example().save(path)
    with pytest.raises(UndeError, match=rf"cannot read '{tmp_path}' \(Is a directory\)"):
        Weights.load(tmp_path)

    def full(source, target):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(UndeError, match="No space left on device"):
        example().save(tmp_path / "w.json")
    assert os.listdir(tmp_path) == []


def test_missing_truncated_and_binary_files_are_refused(tmp_path):
    path = tmp_path / "w.json"
    with pytest.raises(UndeError, match="no weights file"):
        Weights.load(path)
    example().save(path)
    path.write_bytes(path.read_bytes()[:50])
    with pytest.raises(UndeError, match="not a whole JSON file"):
        Weights.load(path)
    for odd in (b"\xff\xfe\x00", b"[" * 100_000, b"[" + b"9" * 5000 + b"]"):
        path.write_bytes(odd)
        with pytest.raises(UndeError, match="not a whole JSON file"):
            Weights.load(path)


@pytest.mark.parametrize(
    ("values", "groups", "message"),
    [
        (torch.ones(2), ["a"], "shape \\(2,\\) for 1 group names"),
        (torch.ones(1, 1), ["a"], "expected one number"),
        (torch.ones(3), ["a", "b", "a"], "more than once: 'a'"),
        (torch.tensor([1.0, float("inf")]), ["a", "b"], "these are not: 'b'"),
    ],
)
def test_bad_values_are_refused(values, groups, message):
    with pytest.raises(UndeError, match=message):
        Weights(values, groups)


def test_alignment_is_by_name_and_lists_what_does_not_match():
    weights = Weights(torch.tensor([0.5, 1.0, 1.5]), ["a", "b", "c"])
    assert weights.aligned_to(["c", "a", "b"]).tolist() == [1.5, 0.5, 1.0]
    with pytest.raises(UndeError, match="no weight for 'x', 'y'; weights for unknown groups 'b', 'c'"):
        weights.aligned_to(["x", "a", "y"])
    with pytest.raises(UndeError, match="unknown groups 'c'\\. Expected the same 2 names"):
        weights.aligned_to(["a", "b"])
    with pytest.raises(UndeError, match="'n7' and 12 more"):  # long lists are cut
        weights.aligned_to(["a", "b", "c"] + [f"n{i}" for i in range(20)])


def test_table_shows_the_largest_first():
    lines = Weights(torch.tensor([1.0, 4.0, 0.0, 3.0]), ["a", "bb", "c", "d"]).table(2).split("\n")
    assert lines[0].split() == ["bb", "2.000", "#" * 20]
    assert lines[1].split() == ["d", "1.500", "#" * 15]
    assert lines[2] == "… and 2 more groups"
