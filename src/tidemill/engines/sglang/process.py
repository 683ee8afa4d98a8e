"""A server that is ours: started on a free port, its output in a file, ended with us, started again when it died."""

import contextlib
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path

from tidemill.contracts.events import Emit, Metrics, Notice
from tidemill.engines.remote.client import Client, ServerFailed
from tidemill.errors import EngineError
from tidemill.units import format_seconds

__all__ = ["ServerProcess", "free_port"]

_LOOK = 0.2
_PORTS = 3  # of which one may be taken by somebody else between its choice and its use
_DYING = 1.0  # seconds for one whose connections are gone to be known as gone too, and how
_GONE = 15.0  # seconds for the guardian to end everything
_LINES, _LONGEST = 12, 400


def free_port() -> int:
    """A port that nobody uses now."""
    with socket.socket() as chosen:
        chosen.bind(("127.0.0.1", 0))
        port: int = chosen.getsockname()[1]
        return port


class ServerProcess:
    """Implements `Process`. `command` makes the command line for a port; `well` returns when its server answers.

    It is started at once. Raises EngineError, with the end of its log, when it does not come up in `deadline` seconds.
    """

    def __init__(
        self,
        command: Callable[[int], Sequence[str]],
        *,
        name: str,
        log: Path,
        well: Callable[[Client], None],
        deadline: float,
        restarts: int,
        emit: Emit,
    ) -> None:
        self._command, self._well = command, well
        self._name, self._log, self._deadline, self._emit = name, log, deadline, emit
        self._restarts, self._left = restarts, restarts
        log.parent.mkdir(parents=True, exist_ok=True)
        for attempt in range(_PORTS):
            self.port = free_port()
            try:
                self._start()
                return
            except EngineError as error:
                # Between look-up and use somebody else may have taken it.
                if attempt == _PORTS - 1 or "address already in use" not in str(error).lower():
                    raise

    @property
    def url(self) -> str:
        """Where it listens: this machine alone."""
        return f"http://127.0.0.1:{self.port}"

    def alive(self) -> bool:
        """See Process."""
        return self._guardian.poll() is None

    def ended(self, within: float) -> bool:
        """See Process."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._guardian.wait(within)
        return not self.alive()

    def last_words(self) -> str:
        """See Process."""
        if self.alive():
            return ""
        lines = self._tail()
        return f"it ended with code {self._guardian.returncode}; the end of {self._log}: {' | '.join(lines)}"

    def restart(self) -> bool:
        """See Process."""
        self.ended(_DYING)
        if self._left == 0:
            raise EngineError(
                f"{self._name} is gone and was started again engine.restarts = {self._restarts} times already; "
                f"{self.last_words()}"
            )
        self._left -= 1
        text = f"{self._name} is started again ({self._restarts - self._left} of {self._restarts})"
        self._emit(Notice(text=f"{text}: {self.last_words() or 'it did not answer'}", level="warning"))
        self._emit(Metrics(values={"engine/restarted": 1.0}))
        self.close()
        self._start()
        return True

    def close(self) -> None:
        """See Process."""
        self._end()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._guardian.wait(_GONE)

    def _start(self) -> None:
        guard = [sys.executable, "-m", "tidemill.engines.sglang.guardian", str(self._log)]
        self._guardian = subprocess.Popen(
            [*guard, *self._command(self.port)],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )
        # Also when nobody closes this: the guardian ends everything when its input does.
        self._end = weakref.finalize(self, _close_input, self._guardian)
        client = Client(self.url, named=self._name)
        try:
            self._wait(client)
        except BaseException:
            self.close()
            raise
        finally:
            client.close()

    def _wait(self, client: Client) -> None:
        ends = time.monotonic() + self._deadline
        while True:
            if not self.alive():
                raise EngineError(f"{self._name} did not start: {self.last_words()}")
            try:
                self._well(client)
                return
            except ServerFailed as error:
                if time.monotonic() > ends:
                    raise EngineError(
                        f"{self._name} did not answer within {format_seconds(self._deadline)} of its start ({error}); "
                        f"see {self._log}, or raise engine.start_deadline if that is normal here"
                    ) from error
            time.sleep(_LOOK)

    def _tail(self) -> list[str]:
        try:
            text = self._log.read_bytes()[-_LINES * _LONGEST :].decode(errors="replace")
        except OSError:
            return []
        return [line.strip()[:_LONGEST] for line in text.splitlines() if line.strip()][-_LINES:]


def _close_input(guardian: "subprocess.Popen[bytes]") -> None:
    with contextlib.suppress(OSError):
        if guardian.stdin is not None:
            guardian.stdin.close()
