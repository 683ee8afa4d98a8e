"""A private cluster a test module, and workers on it."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import ray
from tests.cluster.ray.service import Service

from tidemill.cluster.ray.actors import Role, build_services, start_workers
from tidemill.cluster.ray.connection import connect
from tidemill.cluster.ray.group import RayGroup
from tidemill.cluster.ray.placing import Demand, reserve
from tidemill.cluster.ray.private import PrivateCluster
from tidemill.contracts.events import Emit

Make = Callable[..., contextlib.AbstractContextManager[RayGroup]]


@pytest.fixture(scope="module")
def private() -> Iterator[PrivateCluster]:
    """Joined by this process. Its object store is as small as Ray allows."""
    cluster = PrivateCluster(cpus=1, gpus=0, store_bytes=80 << 20)
    try:
        connect(cluster.address, private=True, say=lambda text: None)
        yield cluster
    finally:
        ray.shutdown()
        cluster.close()


@pytest.fixture(scope="module")
def make_group(private: PrivateCluster, tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Makes workers whose service is `Service`, for a `with` block."""

    @contextlib.contextmanager
    def make(name: str, count: int, emit: Emit, *, threads: int = 0, folder: Path | None = None) -> Iterator[RayGroup]:
        reserved = reserve(Demand(ranks=count, replicas=0, colocated=True, cpus=0.0, gpus=0))
        role = Role(
            name=name,
            group=reserved.group,
            spots=reserved.trainer,
            takes={"num_cpus": 0.001, "num_gpus": 0},
            device="cpu",
            seed=7,
            threads=threads,
            log_folder=folder or tmp_path_factory.mktemp("run") / "logs",
        )
        try:
            (group,) = start_workers([role], emit=emit, check=private.check)
            build_services(role, group, Service, meet=True, deadline=120)
            yield group
            group.close()
        finally:
            reserved.release()

    return make
