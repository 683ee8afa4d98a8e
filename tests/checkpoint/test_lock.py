import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tidemill.checkpoint.lock import RunLock
from tidemill.errors import ConfigError, RunLockedError

HOLDER = """
import sys, time
from pathlib import Path
from tidemill.checkpoint.lock import RunLock
with RunLock(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_second_process_is_refused_with_pid_and_host_until_the_first_is_killed(tmp_path: Path) -> None:
    folder = tmp_path / "a run ü"
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(folder)], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        with pytest.raises(RunLockedError, match=rf"process {holder.pid} on {socket.gethostname()}"), RunLock(folder):
            pass
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.wait(10)
    with RunLock(folder):
        assert json.loads((folder / "lock").read_text())["pid"] == os.getpid()


def test_the_same_process_is_refused_too_and_may_lock_again_afterwards(tmp_path: Path) -> None:
    with RunLock(tmp_path), pytest.raises(RunLockedError, match=str(os.getpid())), RunLock(tmp_path):
        pass
    with RunLock(tmp_path):
        pass


def test_a_forked_child_that_outlives_the_run_does_not_hold_its_folder(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    lock = RunLock(tmp_path)
    lock.__enter__()
    child = os.fork()
    if child == 0:
        os.write(writer, b"x")
        time.sleep(60)
        os._exit(0)
    try:
        assert os.read(reader, 1) == b"x"
        with pytest.raises(RunLockedError), RunLock(tmp_path):
            pass
        lock.forget()  # as the kernel does when the parent is killed
        with RunLock(tmp_path):
            pass
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_lock_whose_owner_is_unreadable_still_refuses(tmp_path: Path) -> None:
    with RunLock(tmp_path):
        (tmp_path / "lock").write_text("")
        with pytest.raises(RunLockedError, match="another process"), RunLock(tmp_path):
            pass


def test_a_folder_that_cannot_be_made_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot write to the run folder"), RunLock(tmp_path / "file" / "run"):
        pass
