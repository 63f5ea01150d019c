"""Shared by all tests; being here also lets those in subfolders import `cases`, `models` and `oracles`."""

import gc
import os
import sys
from pathlib import Path

import pytest
import torch

torch.set_num_threads(1)  # models and matrices of tests are small: a second thread only waits

# They take longest: begun first, none of them keeps one core waiting at the end.
LONG = [
    "index/test_ray.py", "docs/test_docs_code.py", "plan/test_plan.py", "index/test_build_processes.py",
    "gradients/test_huggingface.py", "index/test_label_free.py", "test_notebooks.py", "index/test_segments_faults.py",
    "index/test_calibrate.py", "gradients/test_layer_rules.py", "docs/test_docs_site.py", "store/test_sync.py",
    "ui/test_demo.py", "evaluate/test_calibration.py", "store/test_s3_store.py", "index/test_index_kill.py",
    "test_release.py", "test_faults.py", "index/test_index_workers.py", "evaluate/test_bank_workers.py",
    "parallel/test_processes.py", "ui/explorer/test_explorer_browser.py",
    "devices/test_device_workers.py", "devices/test_device_passes.py", "devices/test_device_builds.py",
]  # fmt: skip


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers():
    """One more than there are cores: tests of workers, clusters and stores wait half of their time."""
    return (os.cpu_count() or 1) + 1


def pytest_collection_modifyitems(items):
    here = Path(__file__).parent
    rank = {here / name: number for number, name in enumerate(LONG)}
    last = here / "devices"  # a device is registered for the rest of the process
    items.sort(key=lambda item: (last in item.path.parents, rank.get(item.path, len(LONG))))


_modules = 0  # that were there when garbage was collected last


def pytest_runtest_setup():
    """What libraries bring stays: garbage is not looked for among it, as plans do again and again."""
    global _modules
    if len(sys.modules) > _modules + 100:
        gc.collect()
        gc.freeze()
        _modules = len(sys.modules)


@pytest.fixture(scope="session", autouse=True)
def quick_disk():
    """No power is cut here, and nobody waits for the disk: test_layout.py has what is synced, and when. Processes that
    tests start do wait for it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", os.fstat)
        yield


@pytest.fixture(scope="session", autouse=True)
def state_folder(tmp_path_factory):
    """The key that commands sign with is not that of whoever runs the tests."""
    before = os.environ.get("XDG_STATE_HOME")
    os.environ["XDG_STATE_HOME"] = str(tmp_path_factory.mktemp("state"))
    yield
    del os.environ["XDG_STATE_HOME"]
    if before is not None:
        os.environ["XDG_STATE_HOME"] = before
