"""tidemill.cluster.ray.private: a cluster fits its machine, or says why there is none. Starting it is in test_ends."""

import tempfile
from collections import namedtuple
from pathlib import Path

import pytest

from tidemill.cluster.ray import private
from tidemill.cluster.ray.private import PrivateCluster, store_for
from tidemill.errors import ClusterError
from tidemill.units import GIB, MIB

Usage = namedtuple("Usage", "total used free")


def test_the_object_store_takes_a_modest_share_of_shared_memory() -> None:
    assert store_for(shared=64 * GIB, memory=128 * GIB) == (4 * GIB, "/dev/shm")
    assert store_for(shared=1 * GIB, memory=128 * GIB) == (GIB // 2, "/dev/shm")
    assert store_for(shared=64 * GIB, memory=2 * GIB) == (GIB // 2, "/dev/shm")


@pytest.mark.parametrize("shared", [0, 64 * MIB, 159 * MIB])
def test_where_shared_memory_is_tiny_objects_lie_on_disk(shared: int) -> None:
    assert store_for(shared=shared, memory=8 * GIB) == (2 * GIB, "")


def test_it_starts_where_shared_memory_is_tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(private, "_SHARED_MEMORY", Path("/there/is/none"))
    cluster = PrivateCluster(cpus=1, gpus=0)
    try:
        assert cluster.address.startswith("127.0.0.1:")
        assert list(cluster.folder.rglob("plasma_store"))
        cluster.check()
    finally:
        cluster.close()
    assert not cluster.folder.exists()


@pytest.mark.parametrize("name", ["long" * 10, "ü"])
def test_a_temporary_folder_that_is_long_or_not_ascii_is_passed_by(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    with tempfile.TemporaryDirectory(prefix=name, dir="/tmp") as parent:
        monkeypatch.setattr(tempfile, "tempdir", parent)
        folder = private._short_folder()
        assert folder.parent in (Path("/tmp"), Path("/var/tmp"))
        folder.rmdir()


def test_without_any_short_folder_it_says_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(private, "_LONGEST_FOLDER", 5)
    with pytest.raises(ClusterError, match="set TMPDIR to a short path"):
        PrivateCluster(cpus=1, gpus=0)


def test_a_full_disk_is_told_before_anything_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(private.shutil, "disk_usage", lambda path: Usage(GIB, GIB, 5 * MIB))
    with pytest.raises(ClusterError, match="has only 5.0 MiB free"):
        PrivateCluster(cpus=1, gpus=0)


def test_a_cluster_that_cannot_start_says_what_ray_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ClusterError, match="cannot start a private Ray cluster: ValueError: .*minimum allowed"):
        PrivateCluster(cpus=1, gpus=0, store_bytes=1)
