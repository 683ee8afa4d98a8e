"""One reward process as its owner sees it: asked with a deadline, ended with everything that it started.

The process leads a session of its own; what it starts is found through the process tree (it adopts orphans) and through
its group, and ended after each call and with it. Environment variables whose names look like secrets are not passed on.
"""

import contextlib
import json
import os
import re
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

import psutil

from tidemill.units import MIB

__all__ = ["Worker", "WorkerDiedError", "WorkerTimeoutError", "without_secrets"]

_SECRET = re.compile(
    r"(^|_)(API)?(KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL)S?(_|$)"
    r"|(APIKEY|TOKEN|SECRET|PASSWORD|CREDENTIAL)S?$"
    r"|(PASSWD|PASSPHRASE|PASS|PWD|PAT|AUTH)$",
    re.I,
)
_FOLDERS = frozenset({"PWD", "OLDPWD"})  # where the shell is and was
_LONGEST_REPLY = 64 * MIB
_GLANCE = 0.1  # seconds between looks at whether the process still lives
_FAREWELL = 5.0  # seconds in which a killed process must be gone


class WorkerTimeoutError(Exception):
    """No reply within the deadline."""


class WorkerDiedError(Exception):
    """The process ended instead of replying; the message says how."""


def without_secrets(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables whose names do not look like secrets (`HF_TOKEN`, `WANDB_API_KEY`, `PGPASSWORD`, `GITHUB_PAT`)."""
    return {name: value for name, value in environment.items() if name in _FOLDERS or not _SECRET.search(name)}


class Worker:
    """Starts a process at once. After WorkerTimeoutError or WorkerDiedError it must be closed and replaced."""

    def __init__(self) -> None:
        """Raises OSError when no process can be started; nothing stays open then."""
        with contextlib.ExitStack() as theirs, contextlib.ExitStack() as ours:
            request_read, self._requests = _pipe(reader=theirs, writer=ours)
            self._replies, reply_write = _pipe(reader=ours, writer=theirs)
            lifeline_read, self._lifeline = _pipe(reader=theirs, writer=ours)
            os.set_blocking(self._requests, False)
            given = (request_read, reply_write, lifeline_read)
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "tidemill.rewards.child", *map(str, (*given, os.getpid()))],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=given,
                env={"OMP_NUM_THREADS": "1", **without_secrets(os.environ)},
                start_new_session=True,
            )
            self._pipes = ours.pop_all()
        self._open = True
        self._tree = psutil.Process(self._process.pid)

    @property
    def pid(self) -> int:
        """Process id, which is the id of its group and session too."""
        return self._process.pid

    def alive(self) -> bool:
        """Whether it can be asked. A dead process stays unreaped until `close`, so that its id is not used again."""
        if not self._open:
            return False
        try:
            return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
        except ChildProcessError:  # another thread has just closed it
            return False

    def call(self, request: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        """The reply to a request, within a deadline. Ends whatever the call left running.

        Raises WorkerTimeoutError, WorkerDiedError.
        """
        deadline = time.monotonic() + seconds
        self._send(json.dumps(request, default=str).encode() + b"\n", deadline)
        reply = self._receive(deadline)
        self._end_descendants()
        return reply

    def kill(self) -> None:
        """End the process, its group and its descendants, at once; from any thread, in the middle of a call too."""
        if not self._open:
            return
        self._end_descendants()
        # The process is not reaped before `close`: until then its id, and the group's, belongs to nobody else.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def close(self) -> None:
        """As `kill`, and give back what this process holds of it. May be called twice, but not beside a call."""
        if not self._open:
            return
        self.kill()
        self._open = False
        self._process.wait(timeout=_FAREWELL)
        self._pipes.close()

    def _end_descendants(self) -> None:
        try:
            descendants = self._tree.children(recursive=True)
        except psutil.NoSuchProcess:
            return
        for process in descendants:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def _send(self, line: bytes, deadline: float) -> None:
        rest = memoryview(line)
        with selectors.DefaultSelector() as selector:
            selector.register(self._requests, selectors.EVENT_WRITE)
            while rest:
                self._wait(selector, deadline)
                try:
                    rest = rest[os.write(self._requests, rest) :]
                except BlockingIOError:
                    continue
                except BrokenPipeError as error:
                    raise WorkerDiedError(self._how_it_ended()) from error

    def _receive(self, deadline: float) -> dict[str, Any]:
        chunks: list[bytes] = []
        size = 0
        with selectors.DefaultSelector() as selector:
            selector.register(self._replies, selectors.EVENT_READ)
            while not (chunks and chunks[-1].endswith(b"\n")):
                self._wait(selector, deadline)
                chunk = os.read(self._replies, 1 << 16)
                size += len(chunk)
                if not chunk or size > _LONGEST_REPLY:
                    raise WorkerDiedError(self._how_it_ended() if not chunk else "its reply is too long")
                chunks.append(chunk)
        reply: dict[str, Any] = json.loads(b"".join(chunks))
        return reply

    def _wait(self, selector: selectors.BaseSelector, deadline: float) -> None:
        """Until the pipe is ready. A descendant may hold it open when the process is dead: so both are looked at."""
        while not selector.select(min(_GLANCE, max(0.0, deadline - time.monotonic()))):
            if not self.alive():
                raise WorkerDiedError(self._how_it_ended())
            if time.monotonic() >= deadline:
                raise WorkerTimeoutError

    def _how_it_ended(self) -> str:
        deadline = time.monotonic() + _FAREWELL
        while self.alive() and time.monotonic() < deadline:
            time.sleep(0.01)
        result = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if result is None:
            return "it closed its pipe"
        if result.si_code == os.CLD_EXITED:
            return f"its process ended with code {result.si_status}"
        return f"its process was ended by {signal.Signals(result.si_status).name}"


def _pipe(*, reader: contextlib.ExitStack, writer: contextlib.ExitStack) -> tuple[int, int]:
    """Both ends of a new pipe, each to be closed with its stack."""
    read, write = os.pipe()
    reader.callback(os.close, read)
    writer.callback(os.close, write)
    return read, write
