"""How fast a tenant sleeps and wakes, against a plain pinned copy of the same bytes in the same run.

Both are measured in turn, cycle by cycle (A B A B): the limit is one copy of all live bytes between a device buffer and
host memory that is ready (pinned on CUDA), the arm under test is `capture` + `release` and `restore` of the host arena
saver, everything included: freeing, allocating, synchronising. Contents are compared after the last wake.

    python benchmarks/offload.py [--device cuda] [--gib 12] [--small-gib 4] [--json FILE]
"""

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from tidemill.contracts.footprint import Part
from tidemill.residency.arena import map_pinned, map_plain
from tidemill.residency.savers.host_arena import HostArenaSaver
from tidemill.units import GIB, MIB
from tidemill.weights.checksum import checksum

CYCLES = 10


@dataclass(frozen=True)
class Figure:
    """One JSON line."""

    arm: str
    case: str
    metric: str
    value: float
    unit: str
    cycle: str
    verified: bool

    def line(self) -> str:
        return json.dumps({"benchmark": "offload", **vars(self)})


def large_tensors(total: int, device: torch.device) -> list[torch.Tensor]:
    """bfloat16 tensors of 64 MiB, as the layers of a large model."""
    count = max(1, total // (64 * MIB))
    elements = total // count // 2
    return [torch.randn(elements, device=device).to(torch.bfloat16) for _ in range(count)]


def small_tensors(total: int, device: torch.device, count: int = 10_000) -> list[torch.Tensor]:
    """10,000 tensors of 256 bytes to 4 MiB and more, log-uniform, together `total`."""
    dice = random.Random(0)
    sizes = [2 ** dice.uniform(8, 22) for _ in range(count)]
    scale = total / sum(sizes)
    return [torch.randint(0, 255, (max(1, int(n * scale)),), dtype=torch.uint8, device=device) for n in sizes]


def timed(device: torch.device, work: Callable[[], None]) -> float:
    """Wall seconds between two synchronisations."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    began = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began


class PlainCopy:
    """The limit: one copy each way between a buffer on the device and a piece of host memory of the same size."""

    def __init__(self, size: int, device: torch.device) -> None:
        # A part of the bytes is enough for a rate, and leaves room for the arm under test.
        self.size = min(size, 2 * GIB)
        self.device_side = torch.zeros(self.size, dtype=torch.uint8, device=device)
        memory, self.unmap = (map_pinned if device.type == "cuda" else map_plain)(self.size)
        self.host_side = torch.frombuffer(memory, dtype=torch.uint8).zero_()

    def out(self) -> None:
        self.host_side.copy_(self.device_side, non_blocking=True)

    def back(self) -> None:
        self.device_side.copy_(self.host_side, non_blocking=True)


def measure(case: str, tensors: list[torch.Tensor], device: torch.device) -> list[Figure]:
    """Ten cycles of limit, sleep, limit, wake; ratios of the first cycle and medians of cycles 3 to 10."""
    size = sum(tensor.nbytes for tensor in tensors)
    before = [checksum(tensor) for tensor in tensors]
    saver = HostArenaSaver(device=device, page_bytes=64 * MIB, pin=device.type == "cuda")
    for number, tensor in enumerate(tensors):
        saver.add(str(number), tensor, Part.WEIGHTS)
    prepare = timed(device, saver.freeze)
    limit = PlainCopy(size, device)
    for warm_up in (limit.out, limit.back):
        timed(device, warm_up)
    rates: dict[str, list[float]] = {"sleep": [], "wake": []}
    ratios: dict[str, list[float]] = {"sleep": [], "wake": []}
    for cycle in range(CYCLES):
        out = limit.size / timed(device, limit.out)
        # Bound to the cycle's number: the saver copies nothing that is sealed already.
        asleep = timed(device, lambda key=cycle: (saver.capture(key), saver.release(key)))
        back = limit.size / timed(device, limit.back)
        awake = timed(device, saver.restore)
        for name, seconds, rate in (("sleep", asleep, out), ("wake", awake, back)):
            rates[name].append(size / seconds / 1e9)
            ratios[name].append(size / seconds / rate)
    verified = [checksum(tensor) for tensor in tensors] == before
    saver.close()
    limit.unmap()
    figures = [Figure("tidemill", case, "prepare_s", prepare, "s", "first", verified)]
    for name in ("sleep", "wake"):
        for cycle_name, pick in (("first", slice(0, 1)), ("median", slice(2, None))):
            ratio, rate = statistics.median(ratios[name][pick]), statistics.median(rates[name][pick])
            figures.append(Figure("tidemill", case, f"{name}_ratio", ratio, "of plain copy", cycle_name, verified))
            figures.append(Figure("tidemill", case, f"{name}_gbps", rate, "GB/s", cycle_name, verified))
    return figures


def table(figures: list[Figure]) -> str:
    """Columns for people."""
    rows = [f"{'case':<14} {'metric':<12} {'cycle':<7} {'value':>8}  unit"]
    for f in figures:
        failed = "" if f.verified else "  FAILED: contents differ"
        rows.append(f"{f.case:<14} {f.metric:<12} {f.cycle:<7} {f.value:>8.3f}  {f.unit}{failed}")
    return "\n".join(rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--gib", type=float, help="size of the case `large` (12 on CUDA, 0.5 on CPU)")
    parser.add_argument("--small-gib", type=float, help="size of the case `small` (4 on CUDA, 0.25 on CPU)")
    parser.add_argument("--json", type=Path, help="write the JSON lines to this file too")
    args = parser.parse_args()
    device = torch.device(args.device)
    on_cuda = device.type == "cuda"
    large = int((args.gib or (12 if on_cuda else 0.5)) * GIB)
    small = int((args.small_gib or (4 if on_cuda else 0.25)) * GIB)
    figures = measure("large", large_tensors(large, device), device)
    if on_cuda:
        torch.cuda.empty_cache()
    figures += measure("small-10000", small_tensors(small, device), device)
    lines = "\n".join(figure.line() for figure in figures)
    print(lines)
    print(table(figures))
    if args.json:
        args.json.write_text(lines + "\n")
    return 0 if all(figure.verified for figure in figures) else 1


if __name__ == "__main__":
    sys.exit(main())
