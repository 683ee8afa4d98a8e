"""What runs in a worker's process: one service, called by name, whose every outcome is a value.

A failure is sent as data, not raised through a transport: what cannot be sent as it is becomes its text.
"""

import platform
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from tidemill import faults
from tidemill.contracts.events import Emit, Event
from tidemill.contracts.workers import Place
from tidemill.errors import TidemillError, WorkerError
from tidemill.residency.groups import open_rendezvous

__all__ = ["Failure", "MakeService", "Reply", "Worker", "failure_of", "value_of"]

MakeService = Callable[[Place, Emit], Any]


@dataclass(frozen=True, kw_only=True)
class Failure:
    """An exception of a worker. `error` is itself where it can be sent, else None; `text` is its one line.

    `where` is the worker with its host, and empty outside of one.
    """

    error: BaseException | None
    text: str
    trace: str
    where: str = ""


@dataclass(frozen=True, kw_only=True, eq=False)
class Reply:
    """The outcome of one call, and what the worker emitted since the one before."""

    value: Any = None
    failure: Failure | None = None
    events: tuple[Event, ...] = ()


_where = ""


class Worker:
    """Holds the service that `build` made. Its calls come one at a time; `control` may come beside them.

    One to a process. `host` is as messages shall name it.
    """

    def __init__(self, *, name: str, fault_text: str, host: str = "") -> None:
        global _where
        _where = f"{name} on {host or platform.node()}"
        faults.as_process(name, fault_text)
        self._name = name
        self._events: list[Event] = []
        self._service: Any = None

    def open_rendezvous(self, host: str) -> Reply:
        """Let ranks meet here; `host:port`, the port being any free one."""
        return self._outcome(lambda: open_rendezvous(host))

    def build(self, make: MakeService, place: Place) -> Reply:
        """Make the service."""

        def build() -> None:
            self._service = make(place, self._events.append)

        return self._outcome(build)

    def call(self, method: str, *arguments: Any) -> Reply:
        """One call of the service. A `Reply` among the arguments stands for its value."""
        return self._outcome(lambda: self._called(method, arguments))

    def give(self, method: str, *arguments: Any) -> Reply:
        """As `call`, for a reply that another worker gets: what was emitted is left for the next call's."""
        return _tried(lambda: self._called(method, arguments))

    def control(self, method: str, *arguments: Any) -> Reply:
        """As `give`, beside the call under way."""
        return _tried(lambda: self._method(method)(*arguments))

    def _called(self, method: str, arguments: tuple[Any, ...]) -> Any:
        return self._method(method)(*(value_of(argument) for argument in arguments))

    def _method(self, name: str) -> Callable[..., Any]:
        if name.startswith("_"):
            raise WorkerError(f"{self._name} has no method {name!r} for others to call")
        method: Callable[..., Any] = getattr(self._service, name)
        return method

    def _outcome(self, work: Callable[[], Any]) -> Reply:
        reply = _tried(work)
        # One read, one cut: another thread of the service may emit meanwhile.
        events = tuple(self._events)
        del self._events[: len(events)]
        return replace(reply, events=events)


def _tried(work: Callable[[], Any]) -> Reply:
    try:
        return Reply(value=work())
    except Exception as error:
        return Reply(failure=failure_of(error))


def value_of(argument: Any) -> Any:
    """A reply's value; anything else as it is. Raises WorkerError where the reply's call raised."""
    if not isinstance(argument, Reply):
        return argument
    failure = argument.failure
    if failure is not None:
        raise WorkerError(f"what {failure.where or 'another worker'} was to give failed there: {failure.text}")
    return argument.value


def failure_of(error: Exception) -> Failure:
    """As data that can be sent."""
    # Our own errors take one message, and the system's a number and a text: both arrive as they were.
    sent = error if isinstance(error, TidemillError) or type(error).__module__ == "builtins" else None
    text = f"{type(error).__name__}: {error}"
    return Failure(error=sent, text=text, trace="".join(traceback.format_exception(error)), where=_where)
