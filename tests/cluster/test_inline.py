"""tidemill.cluster.inline and its contract, tidemill.contracts.cluster."""

from tidemill.cluster.inline import InlineCluster
from tidemill.contracts.cluster import Cluster


def test_a_worker_placed_inline_is_the_worker_itself() -> None:
    cluster: Cluster = InlineCluster()
    worker = object()
    assert cluster.place(lambda: worker) is worker
    cluster.close()
    cluster.close()
