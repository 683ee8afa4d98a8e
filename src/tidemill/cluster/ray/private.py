"""A Ray cluster of our own on this machine: offline, closed to others, gone with the driver.

It listens on this machine only, on ports that the system chooses, and answers only those who know a word that is made
up anew by each driver. Nothing is written outside a folder of its own.
"""

import contextlib
import json
import os
import secrets
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from tidemill.errors import ClusterError, WorkerDiedError
from tidemill.units import GIB, MIB, format_bytes, format_seconds

__all__ = ["PrivateCluster", "store_for"]

_START = 120.0  # seconds; some take 3, a busy machine more
_END = 15.0
_LEAST_STORE, _MOST_STORE = 80 * MIB, 4 * GIB  # Ray refuses to work with less than 75 MiB
_SHARED_MEMORY = Path("/dev/shm")
_LONGEST_FOLDER = 38  # of the 107 bytes that a socket's path may have, Ray needs 67 below it

# One word for all clusters of a driver: Ray reads it once in the life of a process.
_WORD = secrets.token_hex(32)


class PrivateCluster:
    """Starts one. `cpus` is what Ray shall count; `gpus` is None for those of the machine."""

    def __init__(self, *, cpus: int, gpus: int | None, store_bytes: int = 0) -> None:
        """Raises ClusterError. `store_bytes` 0 fits the object store to the machine, as every run has it."""
        self._folder = _short_folder()
        self._guardian: subprocess.Popen[bytes] | None = None
        self._before = {name: os.environ.get(name) for name in _environment()}
        try:
            os.environ.update(_environment())
            self._guardian = self._start(cpus=cpus, gpus=gpus, store_bytes=store_bytes)
            self.address = self._answer(self._guardian)
        except BaseException:
            self.close()
            raise

    @property
    def folder(self) -> Path:
        """Where Ray keeps its sockets, logs, and objects that do not fit into memory, while the cluster lives."""
        return self._folder

    def check(self) -> None:
        """Raises WorkerDiedError when the cluster is gone."""
        # Nothing comes after the address but the end.
        if self._guardian is not None and _readable(self._guardian, 0):
            raise WorkerDiedError("the private Ray cluster of this run ended by itself; start the same command again")

    def close(self) -> None:
        """End it. May be called twice."""
        for name, value in self._before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        guardian, self._guardian = self._guardian, None
        if guardian is not None and guardian.stdin is not None and guardian.stdout is not None:
            guardian.stdin.close()
            guardian.stdout.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                guardian.wait(_END)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _start(self, *, cpus: int, gpus: int | None, store_bytes: int) -> "subprocess.Popen[bytes]":
        fitted, store_folder = store_for(
            shared=shutil.disk_usage(_SHARED_MEMORY).free if _SHARED_MEMORY.is_dir() else 0,
            memory=psutil.virtual_memory().available,
        )
        settings = {
            "folder": str(self._folder),
            "cpus": cpus,
            "gpus": gpus,
            "store_bytes": store_bytes or fitted,
            "store_folder": store_folder or str(self._folder),
        }
        environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
        return subprocess.Popen(
            [sys.executable, "-m", "tidemill.cluster.ray.guardian", str(self._folder), json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env=environment,
        )

    def _answer(self, guardian: "subprocess.Popen[bytes]") -> str:
        line = b"".join(_until_line(guardian)).decode(errors="replace").strip()
        answer = json.loads(line) if line.startswith("{") else {"error": "it ended without a word"}
        if "address" in answer:
            return str(answer["address"])
        raise ClusterError(f"cannot start a private Ray cluster: {answer['error']}{self._last_words()}")

    def _last_words(self) -> str:
        with contextlib.suppress(OSError):
            lines = (self._folder / "head.log").read_text(errors="replace").splitlines()
            return "".join(f"\n  {line}" for line in lines[-10:])
        return ""


def _until_line(guardian: "subprocess.Popen[bytes]") -> Iterator[bytes]:
    """What the head says, to the end of the line or of the head."""
    assert guardian.stdout is not None
    ends = time.monotonic() + _START
    while time.monotonic() < ends:
        if not _readable(guardian, 0.5):
            continue
        piece = os.read(guardian.stdout.fileno(), 65536)
        yield piece
        if not piece or piece.endswith(b"\n"):
            return
    raise ClusterError(
        f"cannot start a private Ray cluster: it was not ready within {format_seconds(_START)}; "
        "see what else keeps this machine busy"
    )


def _readable(guardian: "subprocess.Popen[bytes]", seconds: float) -> bool:
    assert guardian.stdout is not None
    return bool(select.select([guardian.stdout], [], [], seconds)[0])


def store_for(*, shared: int, memory: int) -> tuple[int, str]:
    """Bytes for Ray's object store, and its folder: `/dev/shm`, or empty for a file where that has too little room.

    `shared` is what is free there, `memory` what is free in all. What does not fit goes to disk, more slowly.
    """
    wanted = max(_LEAST_STORE, min(_MOST_STORE, memory // 4))
    if shared // 2 >= _LEAST_STORE:
        return min(wanted, shared // 2), str(_SHARED_MEMORY)
    return wanted, ""


def _short_folder() -> Path:
    """A new folder for this user only, whose path is short enough for sockets, and in the letters that Ray knows."""
    for parent in (tempfile.gettempdir(), "/tmp", "/var/tmp"):
        if parent.isascii() and len(f"{parent}/tidemill-12345678") <= _LONGEST_FOLDER:
            with contextlib.suppress(OSError):
                folder = Path(tempfile.mkdtemp(prefix="tidemill-", dir=parent))
                return _with_room(folder)
    raise ClusterError(
        f"cannot start a private Ray cluster: {tempfile.gettempdir()} cannot be written or its path is too "
        f"long for the sockets in it (over {_LONGEST_FOLDER} bytes) or has letters that are not ASCII; set TMPDIR to a "
        "short path of a folder that can be written"
    )


def _with_room(folder: Path) -> Path:
    free = shutil.disk_usage(folder).free
    if free < 64 * MIB:
        folder.rmdir()
        raise ClusterError(
            f"cannot start a private Ray cluster: {folder.parent} has only {format_bytes(free)} free; free some, or "
            "set TMPDIR to a folder with room"
        )
    return folder


def _environment() -> dict[str, str]:
    return {
        "RAY_USAGE_STATS_ENABLED": "0",
        # With a token in the environment Ray writes none to the home folder.
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": _WORD,
        # What Ray does by itself elsewhere: listen on the loopback interface only.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        # Under `uv run` Ray would copy the working folder and set up an environment for each worker.
        "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    }
