"""Fresh processes for what is measured: one rank each, on a GPU of its own, which answer through a pipe."""

import multiprocessing
import os
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

__all__ = ["Child", "Failed", "new_processes", "one_gpu"]

_PATIENCE = 600.0


class Failed(Exception):
    """A process ended, or raised, instead of answering."""


def new_processes(device: str) -> Any:
    """How to start them: on a CPU as forks of one that has imported everything, which no user of a GPU may be."""
    if device == "cuda":
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["tidemill.trainers.fsdp.trainer", "torch._dynamo", "transformers.models.qwen3.modeling_qwen3"]
    )
    return context


@contextmanager
def one_gpu(index: int) -> Iterator[None]:
    """Processes started within see no GPU but this one: they read it before they have CUDA."""
    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    os.environ["CUDA_VISIBLE_DEVICES"] = before.split(",")[index] if before else str(index)
    try:
        yield
    finally:
        if before is None:
            del os.environ["CUDA_VISIBLE_DEVICES"]
        else:
            os.environ["CUDA_VISIBLE_DEVICES"] = before


class Child:
    """A process that calls `work(pipe, *arguments)`. What it raises is told; it ends with this one at the latest."""

    def __init__(self, context: Any, work: Callable[..., object], *arguments: Any) -> None:
        self.pipe, theirs = context.Pipe()
        self._process = context.Process(target=_guarded, args=(theirs, work, arguments), daemon=True)
        self._process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        """Of the process."""
        return int(self._process.pid)

    def ask(self, question: object) -> Any:
        """Send, and wait for the answer."""
        self.pipe.send(question)
        return self.answer()

    def answer(self) -> Any:
        """The next thing it says. Raises Failed when it ended, raised, or says nothing for ten minutes."""
        try:
            if not self.pipe.poll(_PATIENCE):
                raise Failed(f"nothing was heard for {_PATIENCE:.0f} s")
            said = self.pipe.recv()
        except EOFError:
            self._process.join(10)
            raise Failed(f"the process ended with exit code {self._process.exitcode}") from None
        if isinstance(said, BaseException):
            raise Failed(str(said)) from None
        return said

    def end(self) -> None:
        """Wait for its end, not long."""
        self.pipe.close()
        self._process.join(10)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


def _guarded(pipe: Connection, work: Callable[..., object], arguments: tuple[Any, ...]) -> None:
    try:
        work(pipe, *arguments)
    except (EOFError, BrokenPipeError):
        return
    except BaseException:
        pipe.send(Failed(traceback.format_exc()))
