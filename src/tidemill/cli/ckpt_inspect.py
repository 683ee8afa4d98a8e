"""`tidemill ckpt inspect`: what is in a checkpoint, from its manifest; its tensors too, and numbers of them."""

import argparse
import json
import math
import time
from typing import Any

from tidemill.checkpoint.description import described, described_tensors, with_statistics
from tidemill.cli.ckpt_found import find, of_step, only_or_newest, read_entry
from tidemill.cli.ckpt_table import lines_of
from tidemill.cli.streams import tell
from tidemill.errors import CheckpointError
from tidemill.units import format_bytes, format_seconds

__all__ = ["main"]

_NUMBERS = ("min", "max", "mean", "rms", "nonfinite")


def main(args: argparse.Namespace) -> int:
    """0 when every file is there with its size; only `--statistics`, which reads all, compares checksums as well."""
    entry = only_or_newest(of_step(find(args.run), args.step))
    try:
        told = described(entry)
        if args.tensors or args.statistics:
            told["tensors"] = described_tensors(entry)
    except OSError as error:
        raise CheckpointError(f"cannot inspect {entry.path}: {error}; make it readable") from error
    except CheckpointError as error:
        raise CheckpointError(f"cannot inspect {entry.path}: {error}") from None
    if args.statistics:
        told["tensors"] = with_statistics(told["tensors"], read_entry(entry, "inspect"))
    if args.json:
        tell(json.dumps(_plain(told)))
    else:
        for line in _lines(told):
            tell(line)
    return 1 if told["problems"] else 0


def _plain(value: Any) -> Any:
    """JSON has no NaN and no infinity: null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list) else value


def _lines(told: dict[str, Any]) -> list[str]:
    age = format_seconds(max(0.0, time.time() - told["time"]))
    lines = [
        f"step {told['step']} of attempt {told['attempt']}, {format_bytes(told['bytes'])}, saved {age} ago by "
        f"tidemill {told['release']} (format {told['format']})",
        told["path"],
        *(f"  problem: {text}" for text in told["problems"]),
    ]
    for kind in ("cursor", "warm_up_cursor"):
        at = told["state"].get(kind)
        if isinstance(at, dict):
            lines.append(f"{kind.replace('_', '-')}: epoch {at.get('epoch')}, row {at.get('position')}")
    columns = ("name", "ranks", "replicas", "files", "tensors", "slices", "bytes")
    parts = [(*(str(part[name]) for name in columns[:-1]), format_bytes(part["bytes"])) for part in told["parts"]]
    lines += ["parts:", *lines_of([columns, *parts], indent=2)]
    files = [(file["name"], format_bytes(file["bytes"]), f"{file['slices']} slices") for file in told["files"]]
    lines += ["files:", *lines_of(files, indent=2)]
    for what in ("identity", "versions"):
        lines += [f"{what}:", *lines_of([(name, str(value)) for name, value in told[what].items()], indent=2)]
    settings = [
        (path, json.dumps(found["value"], ensure_ascii=False), found["origin"])
        for path, found in told["settings"].items()
    ]
    lines += ["settings:", *lines_of(settings, indent=2)]
    return lines + (_tensors(told["tensors"]) if "tensors" in told else [])


def _tensors(tensors: list[dict[str, Any]]) -> list[str]:
    numbers = _NUMBERS if tensors and "rms" in tensors[0] else ()
    rows = [("part", "tensor", "dtype", "shape", "bytes", "slices", *numbers)]
    for tensor in tensors:
        cells = (tensor["part"], tensor["name"], tensor["dtype"], str(tensor["shape"]), format_bytes(tensor["bytes"]))
        rows.append((*cells, str(len(tensor["slices"])), *(f"{tensor[name]:.6g}" for name in numbers)))
    return ["tensors:", *lines_of(rows, indent=2)]
