"""A service for tests of workers on Ray: as simple as can be."""

import ctypes
import os
import sys
import threading
import time
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from tidemill import faults
from tidemill.contracts.events import Emit, Metrics, Notice
from tidemill.contracts.workers import Place
from tidemill.errors import TrainerError


class Service:
    """Tells where it is and how it runs, and fails in many ways."""

    def __init__(self, place: Place, emit: Emit) -> None:
        self.place, self.emit = place, emit

    def where(self) -> tuple[int, int, str]:
        return self.place.rank, self.place.ranks, self.place.device

    def rendezvous(self) -> str:
        return self.place.rendezvous

    def sum_of_ranks(self) -> float:
        """A collective over gloo."""
        host, _, port = self.place.rendezvous.rpartition(":")
        store = dist.TCPStore(host, int(port), is_master=False)
        dist.init_process_group("gloo", store=store, rank=self.place.rank, world_size=self.place.ranks)
        value = torch.tensor([self.place.rank + 1.0])
        dist.all_reduce(value)
        return float(value)

    def emits(self) -> None:
        self.emit(Metrics(values={"rank": self.place.rank}))
        self.emit(Notice(text=f"hint {self.place.rank}"))
        self.emit(Notice(text=f"beware {self.place.rank}", level="warning"))

    def add(self, one: int, other: int) -> int:
        faults.point("add")
        return one + other

    def wait(self, seconds: float) -> str:
        time.sleep(seconds)
        return "done"

    def thread(self) -> tuple[int, int, str]:
        return threading.get_ident(), torch.get_num_threads(), os.environ["OMP_NUM_THREADS"]

    def environment(self, name: str) -> str:
        return os.environ.get(name, "not set")

    def draw(self) -> tuple[float, float]:
        return float(np.random.random()), float(torch.rand(1))

    def zeros(self, megabytes: int) -> np.ndarray:
        return np.zeros(megabytes << 20, np.uint8)

    def look_at(self, array: np.ndarray) -> tuple[int, bool, bool]:
        return len(array), bool(array.flags.writeable), bool(array.flags.owndata)

    def say(self, *texts: str) -> None:
        for text in texts:
            print(text)  # noqa: T201

    def say_on_stderr(self, text: str) -> None:
        sys.stderr.write(text)

    def say_from_c(self, text: str) -> None:
        libc = ctypes.CDLL(None)
        libc.printf(f"{text}\n".encode())
        libc.fflush(None)

    def fail_on(self, rank: int) -> None:
        if rank == self.place.rank:
            raise TrainerError(f"cannot go on: rank {rank}")
        time.sleep(60)

    def surprise(self) -> None:
        raise LookupError("nobody expects it")

    def run_out(self, kind: str) -> None:
        if kind == "host":
            raise MemoryError("no more")
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    def leave(self, code: int) -> None:
        os._exit(code)

    def crash(self) -> None:
        ctypes.string_at(0)

    def unsendable(self) -> Any:
        return threading.Lock()
