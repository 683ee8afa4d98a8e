"""tidemill.cluster.inline and its contract, tidemill.contracts.cluster."""

from typing import Any

import pytest

from tidemill.cluster.inline import InlineCluster
from tidemill.contracts.cluster import Cluster
from tidemill.contracts.events import ignore
from tidemill.contracts.workers import Place
from tidemill.errors import ConfigError


def test_a_worker_placed_inline_is_the_worker_itself() -> None:
    cluster: Cluster = InlineCluster(device="cpu", emit=ignore)
    told: list[Place] = []

    def build(place: Place, emit: Any) -> Any:
        told.append(place)
        return "the worker"

    assert cluster.trainer(build, ranks=1) == "the worker"
    assert cluster.engine(build, replicas=1) == "the worker"
    assert told == [Place(), Place()]
    assert cluster.free_bytes() > 0
    assert cluster.shares_devices
    cluster.close()
    cluster.close()


def test_one_process_refuses_several_ranks_and_replicas() -> None:
    cluster = InlineCluster(device="cpu", emit=ignore)
    for place in (lambda: cluster.trainer(None, ranks=2), lambda: cluster.engine(None, replicas=2)):  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="ray"):
            place()
    for count in ({"ranks": 2}, {"replicas": 2}):
        with pytest.raises(ConfigError, match=f"{next(iter(count))} = 2"):
            InlineCluster(device="cpu", emit=ignore, **count)
