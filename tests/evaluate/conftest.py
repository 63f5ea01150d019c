import bank_jobs
import pytest


@pytest.fixture(scope="session")
def reference(tmp_path_factory):
    """A bank that was trained in one process, without any trouble."""
    return bank_jobs.run(tmp_path_factory.mktemp("bank") / "bank.npz")
