"""A Hugging Face export from the host copy: seconds, and bytes handed to the system by those of the files."""

import sys
import tempfile
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from benchmarks.checkpoint.disk import Raw, folder_bytes
from benchmarks.checkpoint.runs import figure
from benchmarks.figures import Figure
from benchmarks.processes import Child, Failed, one_gpu
from tidemill.checkpoint.export import export_model
from tidemill.contracts.events import ignore
from tidemill.contracts.footprint import Part
from tidemill.residency.savers.host_arena import HostArenaSaver
from tidemill.units import GIB, MIB

__all__ = ["run_export"]

_NAME = "model.safetensors"


@dataclass(frozen=True, kw_only=True)
class Found:
    """Of one process, in bytes and seconds; `write` is a plain write of as many bytes."""

    files: int
    handed: int
    seconds: float
    write: float
    verified: bool


def run_export(context: Any, model: Path, device: str, folder: Path) -> list[Figure]:
    """Figures of one fresh process; one line that says so when it failed."""
    with tempfile.TemporaryDirectory(prefix="export-", dir=folder) as own, one_gpu(0):
        child = Child(context, _export, model, device, Path(own))
        try:
            found: Found = child.answer()
        except Failed as failure:
            print(f"export: {failure}", file=sys.stderr)
            return [figure("export", "tidemill-asleep", "failed", 1.0, "yes or no", verified=False)]
        finally:
            child.end()
    values = {
        "files": (found.files / GIB, "GiB"),
        "written": (found.handed / found.files, "of the files"),
        "export": (found.seconds, "s"),
        "export_ratio": (found.write / found.seconds, "of raw write"),
    }
    return [
        figure("export", "tidemill-asleep", metric, value, unit, verified=found.verified)
        for metric, (value, unit) in values.items()
    ]


def _export(pipe: Connection, model: Path, device: str, folder: Path) -> None:
    """Float32 masters as a trainer has them, asleep, in the base's dtype; each must be equal to the base's."""
    base = load_file(model / _NAME)
    masters = {name: tensor.to(device, torch.float32) for name, tensor in base.items()}
    saver = HostArenaSaver(device=device, page_bytes=64 * MIB, pin=device == "cuda")
    for name, tensor in masters.items():
        saver.add(name, tensor, Part.WEIGHTS)
    saver.freeze()
    saver.capture(0)
    saver.release(0)
    snapshot = saver.snapshot()
    # The libraries that build the model's skeleton are loaded by the first export; a run has them.
    export_model(weights=snapshot.tensors, base=model, target=folder / "first", dtype="auto", emit=ignore)
    before, began = _handed(), time.perf_counter()
    target = export_model(weights=snapshot.tensors, base=model, target=folder / "model", dtype="auto", emit=ignore)
    seconds, handed = time.perf_counter() - began, _handed() - before
    snapshot.release()
    files = folder_bytes(target)
    exported = {name: tensor for path in target.glob("*.safetensors") for name, tensor in load_file(path).items()}
    right = exported.keys() == base.keys() and all(torch.equal(exported[name], base[name]) for name in base)
    write = Raw(folder).write(files)
    saver.close()
    pipe.send(Found(files=files, handed=handed, seconds=seconds, write=write, verified=right))


def _handed() -> int:
    """Bytes that this process gave to the system to write until now."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["wchar"])
