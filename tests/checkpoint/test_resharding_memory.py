"""A load takes the pages that a trainer has anyway, and beside them one tensor's room: measured in a child process."""

import select
import subprocess
import sys
import time
from pathlib import Path

SIDE, TENSORS = 2560, 12  # 25 MiB each, 300 MiB together
LARGEST = SIDE * SIDE * 4
MORE = 24 << 20  # buffers of threads and of the C library
PROGRAM = """
import sys
from pathlib import Path

import numpy as np
import torch

from tidemill.checkpoint.commit import Committer
from tidemill.checkpoint.shard import LocalShard
from tidemill.checkpoint.staged import stage
from tidemill.checkpoint.stored import read_checkpoint
from tidemill.contracts.checkpoint import Snapshot, TensorBytes
from tidemill.contracts.footprint import Part
from tidemill.contracts.state import Cursor, RunState
from tidemill.residency.savers.host_arena import HostArenaSaver

folder, side, count = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
torch.set_num_threads(1)


def value(number):
    return np.full((side, side), number + 1, np.float32)


def piece(number, first, last):
    by_rows = number % 2
    box = (slice(first, last), slice(None)) if by_rows else (slice(None), slice(first, last))
    part = np.ascontiguousarray(value(number)[box])
    offset = (first, 0) if by_rows else (0, first)
    data = memoryview(part.reshape(-1).view(np.uint8))
    return TensorBytes(dtype="F32", shape=part.shape, data=data, whole=(side, side), offset=offset)


def saved():
    state = RunState(step=1, attempt=1, seed=0, cursor=Cursor(), warm_up_cursor=Cursor())
    borders = [0, side // 3, side - 7, side]
    shards = [
        LocalShard({f"w{number}": piece(number, first, last) for number in range(count)})
        for first, last in zip(borders, borders[1:])
    ]
    committer = Committer(folder=folder, attempt=1, identity={}, settings={}, retention={})
    return committer.commit(stage(state, {"trainer": Snapshot(shards=shards)}), lambda amount: None)


path = saved()
tensors = {f"w{number}": torch.zeros(side, side) for number in range(count)}
saver = HostArenaSaver(device=torch.device("cpu"), page_bytes=32 << 20, spare_bytes=0, pin=False)
for name, tensor in tensors.items():
    saver.add(name, tensor, Part.WEIGHTS)
saver.freeze()
saver.capture(1)  # all pages are touched
print("ready", flush=True)
sys.stdin.readline()
saver.load(read_checkpoint(path, step=1).parts["trainer"].tensors)
print("loaded", flush=True)
sys.stdin.readline()
assert all(bool((tensor == number + 1).all()) for number, tensor in enumerate(tensors.values()))
print("right", flush=True)
"""


def own_bytes(pid: int) -> int:
    """Memory of a process that is not the content of files."""
    status = Path(f"/proc/{pid}/status").read_text()
    fields = dict(line.split(":", 1) for line in status.splitlines())
    return sum(int(fields[name].split()[0]) << 10 for name in ("RssAnon", "RssShmem"))


def test_a_load_of_pieces_takes_the_room_of_the_largest_tensor_beside_the_pages(tmp_path: Path) -> None:
    words = [sys.executable, "-c", PROGRAM, str(tmp_path), str(SIDE), str(TENSORS)]
    child = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
    try:
        assert child.stdin is not None and child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        before = peak = own_bytes(child.pid)
        assert before > 2 * TENSORS * LARGEST  # the tensors and their pages
        child.stdin.write("go\n")
        ends = time.monotonic() + 100
        while not loaded(child.stdout.fileno()) and time.monotonic() < ends:
            peak = max(peak, own_bytes(child.pid))
            time.sleep(0.001)
        assert child.stdout.readline() == "loaded\n"
        child.stdin.write("go\n")
        assert child.stdout.readline() == "right\n"
        assert peak - before <= LARGEST + MORE, f"{(peak - before) >> 20} MiB"
    finally:
        child.kill()
        child.wait(10)


def loaded(answers: int) -> bool:
    return bool(select.select([answers], [], [], 0)[0])
