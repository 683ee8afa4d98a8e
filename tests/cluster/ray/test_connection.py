"""tidemill.cluster.ray.connection: an address that cannot be joined is refused in seconds, with what to do."""

import socket
import time
from collections.abc import Iterator

import pytest

from tidemill.cluster.ray import connection
from tidemill.cluster.ray.connection import probe
from tidemill.errors import ClusterError


@pytest.fixture
def began() -> Iterator[float]:
    now = time.monotonic()
    yield now
    assert time.monotonic() - now < 20


def test_an_address_where_nobody_listens(began: float) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(ClusterError, match=f"cannot reach the Ray cluster at 127.0.0.1:{port}: .*refused"):
        probe(f"127.0.0.1:{port}")
    with pytest.raises(ClusterError, match=r"check cluster.address, or start a cluster there with `ray start --head"):
        probe("127.0.0.1:70000")


def test_an_address_that_has_no_meaning(began: float) -> None:
    with pytest.raises(ClusterError, match="cannot reach the Ray cluster at no-such-host.invalid:6379"):
        probe("no-such-host.invalid:6379")


def test_a_listener_that_is_no_ray(began: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "_ANSWER", 2.0)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        with pytest.raises(ClusterError, match=r"within 2(\.0)? s: it is no Ray cluster, or a machine is too busy"):
            probe(f"127.0.0.1:{silent.getsockname()[1]}")
