"""A worker group without processes: each call is carried out at once, and what it is given and gives is a copy."""

import pickle
from collections.abc import Sequence
from typing import Any

from tidemill.cluster.failures import raise_failure
from tidemill.cluster.waiting import wait_for_one
from tidemill.cluster.worker import Reply, failure_of, value_of
from tidemill.errors import WorkerError


class Answered:
    """A pending answer that is there."""

    def __init__(self, name: str, reply: Reply) -> None:
        self.name, self.reply = name, reply

    def done(self) -> bool:
        return True

    def result(self, deadline: float) -> Any:
        if self.reply.failure is not None:
            raise_failure(self.name, self.reply.failure)
        return self.reply.value


class LocalGroup:
    """`calls` are the methods called, by `use` or not, in order, with the worker's number."""

    def __init__(self, role: str, services: Sequence[Any]) -> None:
        self.names = tuple(f"{role}-{index}" for index in range(len(services)))
        self.services = services
        self.calls: list[tuple[int, str]] = []
        self.closed = False

    def call(self, method: str, *arguments: Any, deadline: float, doing: str = "", setting: str = "") -> list[Any]:
        return self.call_each(method, [arguments] * len(self.services), deadline=deadline)

    def call_each(
        self, method: str, arguments: Sequence[tuple[Any, ...]], *, deadline: float, doing: str = "", setting: str = ""
    ) -> list[Any]:
        pending = [self.start(worker, method, *each) for worker, each in enumerate(arguments)]
        return self.gather(pending, deadline=deadline, doing=doing)

    def gather(self, pending: Sequence[Any], *, deadline: float, doing: str, setting: str = "") -> list[Any]:
        return [one.result(deadline) for one in pending]

    def wait(self, pending: Sequence[Any], seconds: float) -> None:
        wait_for_one(pending, seconds)

    def start(self, worker: int, method: str, *arguments: Any, doing: str = "", passed_on: bool = False) -> Answered:
        if self.closed:
            raise WorkerError(f"{self.names[worker]} was ended")
        self.calls.append((worker, arguments[1] if method == "use" else method))
        plain = [argument.reply if isinstance(argument, Answered) else argument for argument in arguments]
        try:
            service = self.services[worker]
            copied = pickle.loads(pickle.dumps(plain))
            reply = Reply(value=getattr(service, method)(*(value_of(argument) for argument in copied)))
        except Exception as error:
            reply = Reply(failure=failure_of(error))
        return Answered(self.names[worker], pickle.loads(pickle.dumps(reply)))

    def control(self, worker: int, method: str, *arguments: Any, deadline: float) -> Any:
        return getattr(self.services[worker], method)(*arguments)

    def notify(self, worker: int, method: str, *arguments: Any) -> None:
        self.control(worker, method, *arguments, deadline=1.0)

    def restart(self, worker: int, *, deadline: float) -> None:
        raise WorkerError(f"{self.names[worker]} cannot be started again: nothing ended")

    def close(self) -> None:
        self.closed = True
