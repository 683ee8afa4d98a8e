"""Workers of one role as Ray actors."""

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import (
    GetTimeoutError,
    ObjectStoreFullError,
    OutOfDiskError,
    RayActorError,
    RayError,
    RayTaskError,
)

from tidemill.cluster.calling import gather
from tidemill.cluster.failures import missing_module, no_module, raise_failure
from tidemill.cluster.ray.deaths import death
from tidemill.cluster.ray.logs import last_lines
from tidemill.cluster.ray.waiting import SLICE, fetched, ready
from tidemill.cluster.worker import MakeService, Reply
from tidemill.contracts.events import Emit, Notice
from tidemill.contracts.workers import Pending, Place
from tidemill.errors import PluginError, WorkerError
from tidemill.units import format_seconds

__all__ = ["Member", "RayGroup", "RayPending", "end"]

_FETCH = 600.0  # seconds for a value that is there to come here


@dataclass(frozen=True, kw_only=True, eq=False)
class Member:
    """One worker, and where to read about it."""

    name: str
    host: str
    node: str
    pid: int
    actor: ActorHandle
    log: Path


class RayPending:
    """Implements `Pending`. Among the arguments of another call it goes from worker to worker, past the driver."""

    def __init__(self, group: "RayGroup", worker: int, reference: "ray.ObjectRef[Reply]", doing: str) -> None:
        self.reference = reference
        self._group, self._worker, self._doing = group, worker, doing
        self._reply: Reply | None = None
        self._there = False

    def done(self) -> bool:
        """See Pending."""
        return self._there or self._ready(0.0)

    def result(self, deadline: float) -> Any:
        """See Pending."""
        reply = self.reply(deadline)
        if reply.failure is not None:
            raise_failure(self._group.names[self._worker], reply.failure)
        return reply.value

    def reply(self, deadline: float) -> Reply:
        """The whole outcome. Raises WorkerError for a worker that is gone or silent."""
        if self._reply is None:
            ends = time.monotonic() + deadline
            while not self._there and not self._ready(min(SLICE, max(0.0, ends - time.monotonic()))):
                if time.monotonic() >= ends:
                    raise self._group.silent(self._worker, self._doing, deadline)
            self._reply = self._fetched()
            self._group.tell(self._worker, self._reply)
        return self._reply

    def _ready(self, seconds: float) -> bool:
        self._there = ready([self.reference], seconds)
        return self._there

    def _fetched(self) -> Reply:
        ends = time.monotonic() + _FETCH
        while True:
            try:
                reply: Reply = fetched(self.reference, SLICE)
                return reply
            except GetTimeoutError:
                if time.monotonic() > ends:
                    raise self._group.silent(self._worker, self._doing, _FETCH) from None
            except RayError as error:
                raise self._group.lost(self._worker, error) from None


class RayGroup:
    """Implements `WorkerGroup`. Events of worker 0 go to `emit`, and the warnings of all.

    Large arrays among arguments and values lie in memory that processes of a host share, and are read-only.
    `check` raises when the cluster itself is gone; `renew` starts a worker anew in its place.
    """

    def __init__(
        self,
        members: Sequence[Member],
        *,
        emit: Emit,
        check: Callable[[], None],
        renew: Callable[[int], Member],
    ) -> None:
        self._members = tuple(members)
        self._emit = emit
        self._check = check
        self._renew = renew
        self._made: dict[int, tuple[Any, ...]] = {}
        self._ended = False

    @property
    def names(self) -> tuple[str, ...]:
        """See WorkerGroup."""
        return tuple(member.name for member in self._members)

    @property
    def members(self) -> tuple[Member, ...]:
        """Who they are."""
        return self._members

    def call(
        self, method: str, *arguments: Any, deadline: float, doing: str = "", setting: str = "cluster.deadline"
    ) -> list[Any]:
        """See WorkerGroup."""
        each = [arguments] * len(self._members)
        return self.call_each(method, each, deadline=deadline, doing=doing, setting=setting)

    def call_each(
        self,
        method: str,
        arguments: Sequence[tuple[Any, ...]],
        *,
        deadline: float,
        doing: str = "",
        setting: str = "cluster.deadline",
    ) -> list[Any]:
        """See WorkerGroup."""
        doing = doing or f"answer {method!r}"
        pending = [self.start(worker, method, *each, doing=doing) for worker, each in enumerate(arguments)]
        return self.gather(pending, deadline=deadline, doing=doing, setting=setting)

    def start(self, worker: int, method: str, *arguments: Any, doing: str = "", passed_on: bool = False) -> RayPending:
        """See WorkerGroup. A pending argument is known by its reference: Ray brings its value to the worker."""
        plain = [argument.reference if isinstance(argument, RayPending) else argument for argument in arguments]
        kind = "give" if passed_on else "call"
        return self.ask(worker, kind, method, *plain, doing=doing or f"answer {method!r}")

    def build(self, worker: int, make: MakeService, place: Place, *, doing: str) -> RayPending:
        """Let it make its service, now and whenever it is started again."""
        self._made[worker] = (make, place)
        return self.ask(worker, "build", make, place, doing=doing)

    def restart(self, worker: int, *, deadline: float) -> None:
        """See WorkerGroup."""
        self._check()
        end(self._members[worker].actor)
        member = self._renew(worker)
        self._members = (*self._members[:worker], member, *self._members[worker + 1 :])
        self.ask(worker, "build", *self._made[worker], doing="start again").result(deadline)

    def ask(self, worker: int, kind: str, *arguments: Any, doing: str) -> RayPending:
        """Call a method of the actor itself, which answers with a Reply."""
        if self._ended:
            raise WorkerError(f"{self._members[worker].name} was ended; it can be asked nothing more")
        self._check()
        member = self._members[worker]
        try:
            return RayPending(self, worker, getattr(member.actor, kind).remote(*arguments), doing)
        except (ObjectStoreFullError, OutOfDiskError) as error:
            raise WorkerError(
                f"{member.name} on {member.host} cannot be asked to {doing}: {type(error).__name__}: "
                f"{_last_line(error)}; free memory or disk where Ray keeps its objects: /dev/shm, then the temporary "
                "folder"
            ) from error
        except RayError as error:
            raise self.lost(worker, error) from error

    def control(self, worker: int, method: str, *arguments: Any, deadline: float) -> Any:
        """See WorkerGroup."""
        return self.ask(worker, "control", method, *arguments, doing=f"answer {method!r}").result(deadline)

    def notify(self, worker: int, method: str, *arguments: Any) -> None:
        """See WorkerGroup."""
        with contextlib.suppress(WorkerError):
            self.ask(worker, "control", method, *arguments, doing=f"answer {method!r}")

    def gather(
        self, pending: Sequence[Pending], *, deadline: float, doing: str, setting: str = "cluster.deadline"
    ) -> list[Any]:
        """See WorkerGroup."""
        return gather(
            pending,
            names=[f"{member.name} on {member.host}" for member in self._members],
            doing=doing,
            setting=setting,
            deadline=deadline,
            wait=self.wait,
            end_all=self.close,
        )

    def close(self) -> None:
        """See WorkerGroup."""
        self._ended = True
        for member in self._members:
            end(member.actor)

    def tell(self, worker: int, reply: Reply) -> None:
        """Hand on what a worker emitted."""
        name = self._members[worker].name
        for event in reply.events:
            if worker == 0:
                self._emit(event)
            elif isinstance(event, Notice) and event.level == "warning":
                self._emit(replace(event, text=f"{name}: {event.text}"))

    def silent(self, worker: int, doing: str, deadline: float) -> WorkerError:
        """An error for a worker that did not answer in time."""
        member = self._members[worker]
        return WorkerError(
            f"{member.name} on {member.host} did not {doing} within {format_seconds(deadline)}; see {member.log}"
        )

    def lost(self, worker: int, error: RayError) -> WorkerError | PluginError:
        """An error for an answer that Ray could not bring: mostly the worker is dead."""
        member = self._members[worker]
        if module := missing_module(str(error)):
            # Among the arguments is something of a plug-in.
            return no_module(f"{member.name} on {member.host}", module)
        if isinstance(error, RayTaskError):
            # Raised past our own code: a value that cannot be sent, or an argument whose worker died.
            giver = "the worker that was to give it a value died"
            why = giver if isinstance(error.cause, RayActorError) else _last_line(error)
            return WorkerError(f"{member.name} on {member.host} could not answer: {why}")
        return death(member.name, member.host, str(error), last_lines(member.log), str(member.log))

    def wait(self, pending: Sequence[Pending], seconds: float) -> None:
        """See WorkerGroup."""
        references = [each.reference for each in pending if isinstance(each, RayPending)]
        ends = time.monotonic() + seconds
        while True:
            self._check()
            left = ends - time.monotonic()
            if left <= 0 or ready(references, min(left, SLICE)):
                return


def end(actor: ActorHandle) -> None:
    """Kill it, when there still is something to kill; never raises over the error that this is the end of."""
    with contextlib.suppress(RayError, RuntimeError, ValueError):
        # Ray would start a cluster to kill an actor of one that is gone.
        if ray.is_initialized():
            ray.kill(actor)


def _last_line(error: RayError) -> str:
    return [line for line in str(error).splitlines() if line.strip()][-1].strip()
