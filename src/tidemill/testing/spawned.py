"""A cluster for tests: workers are processes of a fork server that has imported everything once, on one machine.

It starts ranks in tenths of a second and ends them with the test, whatever happens: they end when their pipe closes.
Everything but the transport is what runs in earnest: the same worker, services, proxies and deadlines.
"""

import contextlib
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from typing import Any

from tidemill import faults
from tidemill.cluster.calling import gather
from tidemill.cluster.failures import raise_failure
from tidemill.cluster.waiting import wait_for_one
from tidemill.cluster.worker import MakeService, Reply, Worker
from tidemill.contracts.events import Emit, ignore
from tidemill.contracts.workers import Pending, Place
from tidemill.errors import WorkerDiedError, WorkerError

__all__ = ["SpawnedGroup", "spawned"]

_PRELOAD = [
    "tidemill.trainers.fsdp.trainer",
    "tidemill.engines.transformers.engine",
    "tidemill.testing.spawned_cluster",
    # What the making of a model, and FSDP2, import when they are first used: a second of each child.
    "torch._dynamo",
    "torch.distributed.fsdp",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen3.modeling_qwen3",
]
_START = 120.0
_NOTICE = 20.0


def _serve(name: str, fault_text: str, calls: Connection, asides: Connection) -> None:
    """The life of a child: answer until the other end of `calls` is closed, then end at once, whatever runs."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    worker = Worker(name=name, fault_text=fault_text)
    threading.Thread(target=_answer, args=(worker, asides), daemon=True).start()
    _answer(worker, calls)
    os._exit(0)


def _answer(worker: Worker, connection: Connection) -> None:
    while True:
        try:
            kind, arguments = connection.recv()
        except (EOFError, OSError):
            os._exit(0)
        methods: dict[str, Callable[..., Reply]] = {
            "open_rendezvous": worker.open_rendezvous,
            "build": worker.build,
            "call": worker.call,
            "give": worker.give,
            "control": worker.control,
        }
        connection.send(methods[kind](*arguments))


class _Child:
    """One process and its pipes. Answers on `calls` come in the order of the calls."""

    def __init__(self, name: str, fault_text: str) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PRELOAD)
        self.name = name
        self.calls, theirs = context.Pipe()
        self.asides, aside = context.Pipe()
        self.process: ForkServerProcess = context.Process(
            target=_serve, args=(name, fault_text, theirs, aside), daemon=True
        )
        self.process.start()
        theirs.close()
        aside.close()
        self.sent = 0
        self.answers: list[Any] = []
        self.lock = threading.Lock()

    def send(self, kind: str, *arguments: Any) -> "_Answer":
        try:
            self.calls.send((kind, arguments))
        except OSError:
            raise self.death() from None
        self.sent += 1
        return _Answer(self, self.sent - 1)

    def collect(self) -> bool:
        """Take in what has come; False when nothing more can come."""
        try:
            while self.calls.poll():
                self.answers.append(self.calls.recv())
        except (EOFError, OSError):
            return False
        return True

    def aside(self, *arguments: Any, deadline: float) -> Any:
        with self.lock:
            try:
                self.asides.send(("control", arguments))
                if not self.asides.poll(deadline):
                    raise WorkerError(f"{self.name} did not answer {arguments[0]!r} within {deadline} s")
                return self.asides.recv()
            except (EOFError, OSError):
                raise self.death() from None

    def death(self) -> WorkerDiedError:
        self.process.join(5)
        return WorkerDiedError(f"{self.name} died (exit code {self.process.exitcode}); the run cannot go on without it")

    def end(self) -> None:
        self.process.kill()
        self.process.join(10)
        for connection in (self.calls, self.asides):
            # Another thread may be closing it at this moment.
            with contextlib.suppress(OSError):
                connection.close()


class _Answer:
    """Implements `Pending`."""

    def __init__(self, child: _Child, number: int) -> None:
        self.child = child
        self._number = number

    def done(self) -> bool:
        return not self.child.collect() or len(self.child.answers) > self._number

    def reply(self, deadline: float) -> Reply:
        ends = time.monotonic() + deadline
        while not self.done():
            if time.monotonic() > ends:
                raise WorkerError(f"{self.child.name} did not answer within {deadline} s")
            wait([self.child.calls], 0.05)
        if len(self.child.answers) <= self._number:
            raise self.child.death()
        reply: Reply = self.child.answers[self._number]
        return reply

    def events(self) -> tuple[Any, ...]:
        """What came with the reply, if it came."""
        return self.child.answers[self._number].events if len(self.child.answers) > self._number else ()

    def result(self, deadline: float) -> Any:
        reply = self.reply(deadline)
        if reply.failure is not None:
            raise_failure(self.child.name, reply.failure)
        return reply.value


class SpawnedGroup:
    """Implements `WorkerGroup`. Events of worker 0 go to `emit`."""

    def __init__(self, role: str, size: int, *, fault_text: str = "", emit: Emit = ignore) -> None:
        text = ",".join(filter(None, [faults.told(), fault_text]))
        self._emit = emit
        self._makes: list[tuple[MakeService, Place]] = []
        self._children = [_Child(f"{role}-{index}", text) for index in range(size)]

    def build(self, make: MakeService, *, meet: bool) -> None:
        """Make a service in each worker; `meet` gives them a rendezvous for process groups."""
        rendezvous = ""
        if meet:
            rendezvous = self._children[0].send("open_rendezvous", "127.0.0.1").result(_START)
        places = [Place(rank=r, ranks=len(self._children), rendezvous=rendezvous) for r in range(len(self._children))]
        self._makes = [(make, place) for place in places]
        asked = [child.send("build", make, place) for child, place in zip(self._children, places, strict=True)]
        self.gather(asked, deadline=_START, doing="build")

    @property
    def names(self) -> tuple[str, ...]:
        """`role-0`, `role-1`, ..."""
        return tuple(child.name for child in self._children)

    @property
    def pids(self) -> tuple[int, ...]:
        """Process numbers, for tests that kill."""
        return tuple(child.process.pid or 0 for child in self._children)

    def call(
        self, method: str, *arguments: Any, deadline: float, doing: str = "", setting: str = "cluster.deadline"
    ) -> list[Any]:
        """See WorkerGroup."""
        each = [arguments] * len(self._children)
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
        pending = [self.start(i, method, *each) for i, each in enumerate(arguments)]
        return self.gather(pending, deadline=deadline, doing=doing or f"answer {method!r}", setting=setting)

    def start(self, worker: int, method: str, *arguments: Any, doing: str = "", passed_on: bool = False) -> "_Answer":
        """See WorkerGroup. A pending argument is fetched here: there is one machine only."""
        plain = [argument.reply(_START) if isinstance(argument, _Answer) else argument for argument in arguments]
        return self._children[worker].send("give" if passed_on else "call", method, *plain)

    def wait(self, pending: Sequence[Pending], seconds: float) -> None:
        """See WorkerGroup."""
        wait_for_one(pending, seconds)

    def control(self, worker: int, method: str, *arguments: Any, deadline: float) -> Any:
        """See WorkerGroup."""
        reply: Reply = self._children[worker].aside(method, *arguments, deadline=deadline)
        if reply.failure is not None:
            raise_failure(self._children[worker].name, reply.failure)
        return reply.value

    def notify(self, worker: int, method: str, *arguments: Any) -> None:
        """See WorkerGroup. The answer is waited for: it would stand in the way of the next."""
        with contextlib.suppress(WorkerError):
            self._children[worker].aside(method, *arguments, deadline=_NOTICE)

    def restart(self, worker: int, *, deadline: float) -> None:
        """See WorkerGroup. No fault is armed in the new one."""
        old = self._children[worker]
        old.end()
        self._children[worker] = _Child(old.name, "")
        self._children[worker].send("build", *self._makes[worker]).result(deadline)

    def close(self) -> None:
        """See WorkerGroup."""
        for child in self._children:
            child.end()

    def gather(
        self, pending: Sequence[Pending], *, deadline: float, doing: str, setting: str = "cluster.deadline"
    ) -> list[Any]:
        """See WorkerGroup."""

        def look(some: Sequence[Pending], seconds: float) -> None:
            wait([answer.child.calls for answer in some if isinstance(answer, _Answer)], seconds)

        try:
            return gather(
                pending,
                names=self.names,
                doing=doing,
                setting=setting,
                deadline=deadline,
                wait=look,
                end_all=self.close,
            )
        finally:
            for answer in pending:
                if isinstance(answer, _Answer) and answer.child is self._children[0]:
                    for event in answer.events():
                        self._emit(event)


def spawned(role: str, size: int, make: MakeService, *, meet: bool = True, fault_text: str = "") -> SpawnedGroup:
    """Workers with their services made; end them with `close`."""
    group = SpawnedGroup(role, size, fault_text=fault_text)
    group.build(make, meet=meet)
    return group
