"""One small Ray cluster on this machine for all tests here: a head without processors for jobs, and three nodes."""

import shutil
import tempfile

import pytest

ray = pytest.importorskip("ray")
from ray.cluster_utils import Cluster  # noqa: E402


@pytest.fixture(scope="session")
def cluster():
    folder = tempfile.mkdtemp(prefix="r", dir="/tmp")  # paths of sockets must be short
    made = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 0, "temp_dir": folder, "object_store_memory": 80_000_000},
    )
    made.nodes_to_remove = []
    try:
        yield made
    finally:
        ray.shutdown()
        made.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def node(cluster):
    """Adds a node with room for one worker."""

    def add():
        return cluster.add_node(num_cpus=1, object_store_memory=80_000_000)

    return add
