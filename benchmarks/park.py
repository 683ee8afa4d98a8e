"""What parking process groups takes and frees, under a sharded trainer that sleeps: two ranks, one GPU each.

Each rank builds the FSDP2 trainer on random weights and repeats: step, sleep, park, revive, wake, step. Another pair of
ranks makes the same steps and neither sleeps nor parks: `verified` says that metrics of every step and all tensors in
the end are equal to the last bit. Device memory is what the driver reports as used, other processes included.
`first_collective` is the first one in the world, part of `revive`; `park` and `revive` include waiting for the others.

    python -m benchmarks.park [--device cuda] [--shape qwen3-1.7b] [--cycles 5] [--json FILE]
"""

import argparse
import gc
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch.distributed import distributed_c10d

from benchmarks.processes import new_processes
from benchmarks.real_shape import write_model
from benchmarks.shapes import SHAPES
from benchmarks.trainers import DEADLINE, make_batch, make_trainer
from tidemill.algorithms.losses.cross_entropy import CrossEntropyLoss
from tidemill.contracts.footprint import Part
from tidemill.contracts.workers import Place
from tidemill.residency.groups import ProcessGroups, open_rendezvous
from tidemill.units import MIB

RANKS = 2
Figures = dict[str, list[float]]


class Rank:
    """One rank's trainer, and what is measured of it."""

    def __init__(self, place: Place, model: Path) -> None:
        self.device = torch.device(place.device)
        self.figures: Figures = {}
        self.trainer = make_trainer(model, place)
        self.trainer.gate.open(Part.ALL)
        self.trainer.begin("rl")

    def note(self, name: str, value: float) -> None:
        self.figures.setdefault(name, []).append(value)

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Wall seconds between two synchronisations."""
        self.wait()
        began = time.perf_counter()
        yield
        self.wait()
        self.note(name, time.perf_counter() - began)

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def used(self) -> float:
        """Bytes of the device that are in use, as the driver sees it; 0 without one."""
        if self.device.type != "cuda":
            return 0.0
        free, whole = torch.cuda.mem_get_info()
        return float(whole - free)

    def step(self, number: int) -> dict[str, float]:
        with self.timed("step"):
            report = self.trainer.step(make_batch(number, self.trainer.vocabulary), CrossEntropyLoss())
        return dict(report.metrics)

    def cycle(self) -> None:
        """Sleep, park, revive, wake."""
        trainer = self.trainer
        with self.timed("sleep"):
            trainer.sleep()
        asleep = self.used()
        with self.timed("park"):
            trainer.park()
        parked = self.used()
        self.note("groups_parked", len(distributed_c10d._world.pg_map))
        with self.timed("revive"):
            trainer.revive()
        self.note("device_asleep", asleep)
        self.note("device_parked", parked)
        self.note("device_freed", asleep - parked)
        self.note("device_revived", self.used())
        with self.timed("wake_up"):
            trainer.wake_up(Part.ALL)
        gc.collect()
        self.note("groups_alive", len(distributed_c10d._world.pg_map))
        self.note("threads", len(list(Path("/proc/self/task").iterdir())))
        self.note("files", len(list(Path("/proc/self/fd").iterdir())))

    def checksums(self) -> dict[str, str]:
        """Of this rank's pieces of everything that is saved."""
        snapshot = self.trainer.snapshot()
        found = {name: xxhash.xxh3_64_hexdigest(tensor.data) for name, tensor in snapshot.tensors.items()}
        snapshot.release()
        return found


def watch(rank: Rank, method: str, name: str) -> None:
    """Take the time of one step within park or revive, which no public call makes alone."""
    inner: Callable[..., Any] = getattr(ProcessGroups, method)

    def timed(groups: ProcessGroups) -> None:
        with rank.timed(name):
            inner(groups)

    setattr(ProcessGroups, method, timed)


def live(place: Place, model: Path, cycles: int, parking: bool, answer: Connection) -> None:
    """The life of a rank's process."""
    if place.device == "cuda":
        # Else the backward pass of attention adds up in any order, and no run equals another to the last bit.
        torch.use_deterministic_algorithms(True, warn_only=True)
    else:
        torch.set_num_threads(1)
    rank = Rank(place, model)
    watch(rank, "_end", "destroy")
    watch(rank, "_first_collective", "first_collective")
    metrics = [rank.step(0)]
    for number in range(cycles):
        if parking:
            rank.cycle()
        metrics.append(rank.step(number + 1))
    answer.send((metrics, rank.checksums(), rank.figures))
    rank.trainer.close()


def run_ranks(arguments: argparse.Namespace, model: Path, *, parking: bool) -> list[tuple[Any, Any, Figures]]:
    """What every rank found. Raises SystemExit when one of them died."""
    context = new_processes(arguments.device)
    address = open_rendezvous("127.0.0.1")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else [str(index) for index in range(RANKS)]
    ranks = []
    try:
        for index in range(RANKS):
            if arguments.device == "cuda":
                # A rank sees no GPU but its own; its process reads this before it has CUDA.
                os.environ["CUDA_VISIBLE_DEVICES"] = names[index]
            place = Place(rank=index, ranks=RANKS, device=arguments.device, rendezvous=address)
            ours, theirs = context.Pipe()
            process = context.Process(target=live, args=(place, model, arguments.cycles, parking, theirs), daemon=True)
            process.start()
            theirs.close()
            ranks.append((process, ours))
        return [_answer(process, pipe) for process, pipe in ranks]
    finally:
        for process, _ in ranks:
            process.join(30)
            process.kill()
        if visible is None:
            os.environ.pop("CUDA_VISIBLE_DEVICES", None)
        else:
            os.environ["CUDA_VISIBLE_DEVICES"] = visible


def _answer(process: Any, pipe: Connection) -> tuple[Any, Any, Figures]:
    try:
        if pipe.poll(2 * DEADLINE):
            found: tuple[Any, Any, Figures] = pipe.recv()
            return found
    except EOFError:
        pass
    process.join(5)
    raise SystemExit(f"{process.name} gave no figures (exit code {process.exitcode})")


def outcome(ranks: list[tuple[Any, Any, Figures]]) -> list[tuple[Any, Any]]:
    """What must be equal: metrics and checksums, by rank."""
    return [(metrics, checksums) for metrics, checksums, _ in ranks]


UNITS = {"groups_parked": "groups", "groups_alive": "groups", "threads": "threads", "files": "files"}


def lines_of(found: list[Figures], shape: str, verified: bool) -> list[dict[str, Any]]:
    """JSON lines; the larger of the ranks' values, cycle by cycle. `last` beside `first` shows growth."""
    lines = []
    for name in found[0]:
        values = [max(each) for each in zip(*(figures[name] for figures in found), strict=True)]
        unit, scale = UNITS.get(name, "s"), 1.0
        if name.startswith("device"):
            unit, scale = "MiB", 1 / MIB
        for cycle, value in (("first", values[0]), ("median", statistics.median(values)), ("last", values[-1])):
            lines.append(
                {"benchmark": "park", "arm": "tidemill", "case": shape, "metric": name,
                 "value": round(value * scale, 4), "unit": unit, "cycle": cycle, "verified": verified}
            )  # fmt: skip
    return lines


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="tiny")
    parser.add_argument("--cycles", type=int, default=5)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.device == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if arguments.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory() as name:
        # In a process of its own: this one shall hold no memory of a GPU.
        writer = new_processes(arguments.device).Process(target=write_model, args=(Path(name), arguments.shape))
        writer.start()
        writer.join()
        if writer.exitcode:
            raise SystemExit(f"no model of shape {arguments.shape} could be written")
        parked = run_ranks(arguments, Path(name), parking=True)
        twin = run_ranks(arguments, Path(name), parking=False)
        verified = outcome(parked) == outcome(twin)
        if not verified:
            repeats = outcome(run_ranks(arguments, Path(name), parking=False)) == outcome(twin)
            print(f"not equal to the twin; the twin made once more is equal to itself: {repeats}", file=sys.stderr)
    lines = lines_of([figures for _, _, figures in parked], arguments.shape, verified)
    text = "\n".join(json.dumps(line) for line in lines)
    print(text)
    for line in lines:
        failed = "" if verified else "  FAILED: not bit-equal to the twin"
        print(f"{line['metric']:>18} {line['cycle']:>7} {line['value']:>12} {line['unit']}{failed}")
    if arguments.json:
        arguments.json.write_text(text + "\n")
    return 0 if verified else 1


if __name__ == "__main__":
    sys.exit(main())
