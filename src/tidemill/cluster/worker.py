"""What runs in a worker's process: one service, called by name, whose every outcome is a value.

A failure is sent as data, not raised through a transport: what cannot be sent as it is becomes its text.
"""

import traceback
from collections.abc import Callable
from dataclasses import dataclass
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
    """An exception of a worker. `error` is itself where it can be sent, else None; `text` is its one line."""

    error: BaseException | None
    text: str
    trace: str


@dataclass(frozen=True, kw_only=True, eq=False)
class Reply:
    """The outcome of one call, and what the worker emitted since the one before."""

    value: Any = None
    failure: Failure | None = None
    events: tuple[Event, ...] = ()


class Worker:
    """Holds the service that `build` made. Its calls come one at a time; `control` may come beside them."""

    def __init__(self, *, name: str, fault_text: str) -> None:
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
        return self._outcome(lambda: self._method(method)(*(value_of(argument) for argument in arguments)))

    def control(self, method: str, *arguments: Any) -> Reply:
        """As `call`; what was emitted is left for the next of these to bring."""
        try:
            return Reply(value=self._method(method)(*arguments))
        except Exception as error:
            return Reply(failure=failure_of(error))

    def _method(self, name: str) -> Callable[..., Any]:
        if name.startswith("_"):
            raise WorkerError(f"{self._name} has no method {name!r} for others to call")
        method: Callable[..., Any] = getattr(self._service, name)
        return method

    def _outcome(self, work: Callable[[], Any]) -> Reply:
        try:
            value, failure = work(), None
        except Exception as error:
            value, failure = None, failure_of(error)
        # One read, one cut: another thread of the service may emit meanwhile.
        events = tuple(self._events)
        del self._events[: len(events)]
        return Reply(value=value, failure=failure, events=events)


def value_of(argument: Any) -> Any:
    """A reply's value; anything else as it is. Raises what the reply's call raised."""
    if not isinstance(argument, Reply):
        return argument
    if argument.failure is not None:
        raise argument.failure.error or WorkerError(argument.failure.text)
    return argument.value


def failure_of(error: Exception) -> Failure:
    """As data that can be sent."""
    # Our own errors take one message, and the system's a number and a text: both arrive as they were.
    sent = error if isinstance(error, TidemillError) or type(error).__module__ == "builtins" else None
    text = f"{type(error).__name__}: {error}"
    return Failure(error=sent, text=text, trace="".join(traceback.format_exception(error)))
