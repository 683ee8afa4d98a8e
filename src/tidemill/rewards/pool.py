"""Reward processes with the user's function loaded, replaced when they hang or die, and asked side by side.

Every process is started from a thread that lives as long as the pool: Linux ends a process that asked to die with its
parent when the *thread* that started it ends.
"""

import queue
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tidemill.errors import PluginError, RewardError
from tidemill.rewards.worker import Worker, WorkerDiedError, WorkerTimeoutError

__all__ = ["Pool"]

_LOAD_SECONDS = 120.0


class Pool:
    """`workers` processes that hold the function `use`, called with `keywords`, each allowed `memory` bytes more.

    Raises PluginError when the function cannot be loaded, RewardError when no process can be started.
    """

    def __init__(self, *, use: str, keywords: Mapping[str, Any], memory: int, workers: int) -> None:
        self._use, self._keywords, self._memory = use, dict(keywords), memory
        self._threads = ThreadPoolExecutor(max_workers=workers, thread_name_prefix="reward")
        self._workers: list[Worker] = []
        self._idle: queue.SimpleQueue[Worker] = queue.SimpleQueue()
        self._closed = False
        # Held to start a process and to close: one that is just being started is ended by `close`, or never started.
        self._starting = threading.Lock()
        try:
            self._idle.put(self._threads.submit(self._start).result())
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> tuple[int, ...]:
        """Ids of the processes that live."""
        return tuple(worker.pid for worker in self._workers if worker.alive())

    def submit(self, answers: Sequence[Mapping[str, Any]], seconds: float) -> "Future[dict[str, Any]]":
        """The reply of a process to these answers; a process that hangs or dies becomes a reply `died`."""
        return self._threads.submit(self._call, list(answers), seconds)

    def close(self) -> None:
        """End every process at once, in the middle of a call or of loading too. May be called twice."""
        with self._starting:
            self._closed = True
        for worker in list(self._workers):
            worker.kill()
        self._threads.shutdown(wait=True, cancel_futures=True)
        for worker in list(self._workers):
            worker.close()

    def _call(self, answers: list[Mapping[str, Any]], seconds: float) -> dict[str, Any]:
        worker = self._take()
        try:
            reply = worker.call({"answers": answers}, seconds)
        except WorkerTimeoutError:
            reply = {"died": f"it took longer than {seconds:g} s (reward.timeout)"}
        except WorkerDiedError as error:
            reply = {"died": str(error)}
        if "died" in reply:
            self._discard(worker)
        else:
            self._idle.put(worker)
        return reply

    def _take(self) -> Worker:
        """An idle process; a new one when none is. No more are ever out than there are threads."""
        while True:
            try:
                worker = self._idle.get_nowait()
            except queue.Empty:
                return self._start()
            if worker.alive():
                return worker
            self._discard(worker)

    def _discard(self, worker: Worker) -> None:
        worker.close()
        self._workers.remove(worker)

    def _start(self) -> Worker:
        with self._starting:
            if self._closed:
                raise self._not_loaded("the pool is closed")
            worker = self._new_process()
            self._workers.append(worker)
        request = {"load": self._use, "keywords": self._keywords, "memory": self._memory, "sys_path": _search_path()}
        try:
            reply = worker.call(request, _LOAD_SECONDS)
        except WorkerTimeoutError:
            reply = {"error": f"it was not loaded within {_LOAD_SECONDS:g} s"}
        except WorkerDiedError as error:
            reply = {"error": str(error)}
        if "error" in reply or self._closed:
            self._discard(worker)
            raise self._not_loaded(reply.get("error", "the pool is closed"))
        return worker

    def _new_process(self) -> Worker:
        try:
            return Worker()
        except OSError as error:
            raise RewardError(
                f"cannot start a process for the reward function {self._use}: {error}; end other processes, lower "
                "reward.workers, or raise the limits on processes and open files"
            ) from error

    def _not_loaded(self, reason: str) -> PluginError:
        return PluginError(
            f"cannot load the reward function {self._use}: {reason}; "
            "write reward.use as module:function or path/to/file.py:function"
        )


def _search_path() -> list[str]:
    """Where the child looks for modules: the working folder, then as here, so that names mean the same in both."""
    return [str(Path.cwd()), *filter(None, sys.path)]
