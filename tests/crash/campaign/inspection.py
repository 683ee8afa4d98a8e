"""What lies in a run folder after a kill, judged from outside: by the bytes, not by what the program says."""

import hashlib
import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.crash.small_run import without_attempt
from tidemill.checkpoint.catalog import Entry, entries, problems_of
from tidemill.checkpoint.manifest import MANIFEST, STATE, Manifest

Version = Mapping[str, str]
"""A hash of each piece of a checkpoint, by part, tensor and offset."""


Files = Mapping[str, str]
"""A hash of each file below a folder, by its path."""


@dataclass(frozen=True)
class Finding:
    """Something that must not be: `kind` is torn, lost, mixed, held, unequal or failed."""

    kind: str
    text: str


def version(folder: Path) -> Version:
    """Of the checkpoint in `folder`. Where it lies in files does not count, nor which start wrote it."""
    found: dict[str, str] = {}
    for file in Manifest.read(folder / MANIFEST).files:
        data = (folder / file.name).read_bytes() if file.slices else b""
        for piece in file.slices:
            place = f"{file.part}/{piece.name} at {list(piece.offset)}"
            found[place] = hashlib.sha256(data[piece.begin : piece.end]).hexdigest()
    state: Any = without_attempt(json.loads((folder / STATE).read_text()))
    for name, value in {**state["parts"], "run": state["run"]}.items():
        found[f"{name} in words"] = hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
    return found


def files(folder: Path) -> Files:
    """Of an export."""
    found = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in found}


def findings_of_exports(folder: Path, wanted: Mapping[int, Files]) -> Iterator[Finding]:
    """What is wrong with the exports in `folder`; one that has its name must be whole."""
    for path in sorted(folder.glob("step-*")):
        if different := files(path).items() ^ wanted[int(path.name.removeprefix("step-"))].items():
            yield Finding("torn", f"the export {path.name} has another {sorted(dict(different))[0]}")


def findings(
    folder: Path, *, acknowledged: int, damaged: Collection[int], versions: Mapping[int, Version]
) -> Iterator[Finding]:
    """What is wrong with the checkpoints in `folder`, which a run left that had acknowledged step `acknowledged`.

    `versions` has what each step must hold. Steps in `damaged` may be broken: a test broke them.
    """
    whole = [0]
    for entry in entries(folder) if folder.exists() else []:
        stored, reason = problems_of(entry)
        if stored is not None:
            whole.append(entry.step)
            yield from _differences(entry, versions)
        elif entry.step not in damaged:
            yield Finding("torn", f"{entry.path.name} is taken for a checkpoint: {reason}")
    if max(whole) < acknowledged:
        yield Finding("lost", f"step {acknowledged} was acknowledged, {max(whole)} is the newest that is left")


def _differences(entry: Entry, versions: Mapping[int, Version]) -> Iterator[Finding]:
    found, wanted = version(entry.path), versions[entry.step]
    if missing := wanted.keys() ^ found.keys():
        yield Finding("torn", f"{entry.path.name} has other pieces than it must have: {sorted(missing)[:3]}")
    for place in wanted.keys() & found.keys():
        if found[place] == wanted[place]:
            continue
        other = [step for step, pieces in versions.items() if pieces.get(place) == found[place]]
        if other:
            yield Finding("mixed", f"{entry.path.name} has {place} of step {other[0]}")
        else:
            yield Finding("torn", f"{entry.path.name} has {place} of no step at all")
        return
