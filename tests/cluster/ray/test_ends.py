"""Nothing is left of a private cluster, however its driver ends.

tidemill.cluster.ray.guardian and tidemill.cluster.ray.head, below a driver in a process of its own.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

DRIVER = Path(__file__).with_name("driver.py")
GONE = 10.0  # seconds


@dataclass
class Driver:
    """A running driver, and everything that it has started."""

    process: "subprocess.Popen[str]"
    folder: Path
    workers: list[int]
    below: list[psutil.Process]
    started: float

    def left(self) -> list[str]:
        """Processes that are still there."""
        found = []
        for process in self.below:
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(f"{process.pid} {' '.join(process.cmdline())[:80]}")
        return found

    def nothing_is_left(self) -> None:
        ends = time.monotonic() + GONE
        while (self.left() or self.folder.exists()) and time.monotonic() < ends:
            time.sleep(0.05)
        assert self.left() == []
        assert not self.folder.exists()


@contextlib.contextmanager
def driver(how: str, home: Path) -> Iterator[Driver]:
    """The driver in a process group of its own, as a shell would start it, at its line of JSON."""
    process = subprocess.Popen(
        [sys.executable, str(DRIVER), how],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,
        env={**os.environ, "HOME": str(home)},
        cwd=Path(__file__).parents[3],
    )
    below: list[psutil.Process] = []
    try:
        assert process.stdout is not None and process.stderr is not None
        line = process.stdout.readline()
        assert line.startswith("{"), process.stderr.read()
        told = json.loads(line)
        if process.poll() is None:
            with contextlib.suppress(psutil.NoSuchProcess):
                below = psutil.Process(process.pid).children(recursive=True)
        yield Driver(process, Path(told["folder"]), told["pids"], below, told["started"])
    finally:
        process.kill()
        process.communicate()
        for left in below:
            with contextlib.suppress(psutil.NoSuchProcess):
                left.kill()


def nobody_else_can_join(made: Driver) -> None:
    """No other host reaches it, and no other user of this one its sockets."""
    listening = [
        connection.laddr.ip
        for process in made.below
        for connection in process.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    ]
    assert listening
    assert {ip.removeprefix("::ffff:") for ip in listening} <= {"127.0.0.1", "::1"}
    assert made.folder.stat().st_mode & 0o077 == 0


@pytest.fixture
def home(tmp_path: Path) -> Path:
    folder = tmp_path / "home"
    folder.mkdir()
    return folder


def test_it_starts_with_all_well_known_ports_taken_and_writes_nothing_into_the_home_folder(home: Path) -> None:
    with contextlib.ExitStack() as stack:
        for port in (6379, 8265, 10001, 52365, 44217, 44227):
            with contextlib.suppress(OSError):  # somebody else has it already
                taken = stack.enter_context(socket.socket())
                taken.bind(("127.0.0.1", port))
                taken.listen()
        with driver("end", home) as made:
            out, err = made.process.communicate(timeout=60)
            assert (made.process.returncode, out, err) == (0, "", "")
            made.nothing_is_left()
            assert made.started < 60
    assert list(home.iterdir()) == []


def test_nothing_is_left_after_an_exception(home: Path) -> None:
    with driver("error", home) as made:
        _, err = made.process.communicate(timeout=60)
        assert made.process.returncode == 1
        assert "on purpose" in err
        made.nothing_is_left()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name)
def test_nothing_is_left_after_a_signal_to_the_whole_group(home: Path, number: signal.Signals) -> None:
    with driver("wait", home) as made:
        assert len(made.below) >= 6
        assert {process.pid for process in made.below} >= set(made.workers)
        # A session of their own: Ctrl-C in the driver's terminal is the driver's alone.
        assert {os.getsid(process.pid) for process in made.below} == {made.below[0].pid}
        os.killpg(made.process.pid, number)
        made.process.communicate(timeout=60)
        assert made.process.returncode != 0
        made.nothing_is_left()


def test_the_cluster_ends_without_its_guardian_too(home: Path) -> None:
    with driver("wait", home) as made:
        nobody_else_can_join(made)
        (guardian,) = (process for process in made.below if "tidemill.cluster.ray.guardian" in process.cmdline())
        guardian.kill()
        made.process.kill()
        made.process.communicate(timeout=60)
        made.nothing_is_left()


def test_a_cluster_that_ends_by_itself_ends_the_driver_too(home: Path) -> None:
    with driver("check", home) as made:
        (raylet,) = (process for process in made.below if process.name() == "raylet")
        raylet.kill()
        made.process.communicate(timeout=30)
        assert made.process.returncode != 0
        made.nothing_is_left()
