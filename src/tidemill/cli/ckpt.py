"""`tidemill ckpt ls | verify | export`: look at a run's checkpoints, and take a model out of one.

Only reads what a run wrote, so it may be used while the run goes on. `verify` ends with 0 only when every checkpoint
asked for holds.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

from tidemill.checkpoint.catalog import Entry, entries, newest, problems_of
from tidemill.checkpoint.export import export_model
from tidemill.checkpoint.manifest import MANIFEST, Manifest
from tidemill.checkpoint.retention import RetentionRule
from tidemill.checkpoint.stored import StoredCheckpoint, weights_of
from tidemill.cli.streams import tell
from tidemill.contracts.events import Event
from tidemill.contracts.events import Progress as Progressed
from tidemill.errors import CheckpointError, ConfigError
from tidemill.units import format_bytes, format_seconds

__all__ = ["main"]


@dataclass(frozen=True, kw_only=True)
class _Row:
    """One checkpoint as it is shown. `age` is in seconds, for people; `problem` is empty when it is verified."""

    step: int
    path: str
    age: float
    bytes: int
    complete: bool
    verified: bool
    kept: str
    problem: str


def main(args: argparse.Namespace) -> int:
    """Do `args.action`; the exit code. Raises ConfigError for what is not there, CheckpointError for what fails."""
    match args.action:
        case "ls":
            return _list(args)
        case "verify":
            return _verify(args)
        case _:
            return _export(args)


def _list(args: argparse.Namespace) -> int:
    rows = _rows(_entries(args.run))
    if args.json:
        tell(json.dumps({"run": str(args.run), "checkpoints": [asdict(row) for row in rows]}))
        return 0
    table = [("step", "age", "size", "complete", "verified", "why kept")]
    table += [
        (
            str(row.step),
            format_seconds(row.age) if row.complete else "-",
            format_bytes(row.bytes),
            _yes(row.complete),
            _yes(row.verified),
            row.kept,
        )
        for row in rows
    ]
    widths = [max(len(line[column]) for line in table) for column in range(len(table[0]))]
    for line in table:
        cells = zip(line, widths, strict=True)
        tell("  ".join(cell.ljust(width) for cell, width in cells).rstrip())
    _tell_problems(rows)
    return 0


def _verify(args: argparse.Namespace) -> int:
    found = _entries(args.run)
    chosen = found if args.step is None else [_of_step(found, args.run, args.step)]
    rows = _rows(chosen)
    holds = all(row.verified for row in rows)
    if args.json:
        tell(json.dumps({"holds": holds, "checkpoints": [asdict(row) for row in rows]}))
    else:
        for row in rows:
            tell(f"{Path(row.path).name}: {'holds' if row.verified else row.problem}")
    return 0 if holds else 1


def _export(args: argparse.Namespace) -> int:
    found = _entries(args.run)
    if args.step is None:
        stored, rejected = newest(args.run / "checkpoints")
        for item in rejected:
            sys.stderr.write(f"warning: {item.entry.path.name} is not whole and is passed over: {item.reason}\n")
    else:
        entry = _of_step(found, args.run, args.step)
        stored, problem = problems_of(entry)
        if stored is None:
            raise CheckpointError(f"cannot export {entry.path}: {problem}; export another step")
    if stored is None:
        raise ConfigError(f"cannot export: {args.run / 'checkpoints'} holds no checkpoint any more; try again")
    with _progress("exporting", 0) as advance:
        shown = 0

        def emit(event: Event) -> None:
            nonlocal shown
            if isinstance(event, Progressed):
                advance(event.done - shown, event.total)
                shown = event.done

        target = export_model(
            weights=weights_of(stored), base=_base_of(stored), target=args.out, dtype=args.dtype, emit=emit
        )
    if args.json:
        tell(json.dumps({"export": str(target), "step": stored.state.step}))
    else:
        tell(f"step {stored.state.step} exported to {target}")
    return 0


def _entries(run: Path) -> list[Entry]:
    found = entries(run / "checkpoints")
    if not found:
        hint = (
            f"did you mean {run.parent.parent}?"
            if run.parent.name == "checkpoints"
            else "name a run's folder (run.dir)"
        )
        raise ConfigError(f"no checkpoints in {run / 'checkpoints'}; {hint}")
    return found


def _of_step(found: list[Entry], run: Path, step: int) -> Entry:
    for entry in reversed(found):
        if entry.step == step:
            return entry
    steps = ", ".join(str(entry.step) for entry in found)
    raise ConfigError(f"no checkpoint of step {step} in {run / 'checkpoints'}; there are {steps}")


def _base_of(stored: StoredCheckpoint) -> Path:
    try:
        return Path(stored.manifest.settings["settings"]["model"])
    except (KeyError, TypeError):
        raise CheckpointError(
            f"cannot export {stored.path}: its manifest does not say which model folder the run started from"
        ) from None


def _rows(chosen: list[Entry]) -> list[_Row]:
    total = sum(path.stat().st_size for entry in chosen for path in entry.path.glob("*.safetensors"))
    manifests = {entry: _manifest(entry) for entry in chosen}
    kept = _kept([manifest for manifest in manifests.values() if manifest is not None])
    rows = []
    with _progress("verifying", total) as advance:
        for entry, manifest in manifests.items():
            problem = _problem(entry, lambda count: advance(count, total))
            rows.append(
                _Row(
                    step=entry.step,
                    path=str(entry.path),
                    age=max(0.0, time.time() - manifest.time) if manifest else 0.0,
                    bytes=manifest.total_bytes if manifest else 0,
                    complete=entry.complete,
                    verified=not problem,
                    kept=kept.get(entry.step, "goes at the next save") if manifest else "not whole: never deleted",
                    problem=problem,
                )
            )
    return rows


def _manifest(entry: Entry) -> Manifest | None:
    try:
        return Manifest.read(entry.path / MANIFEST)
    except (CheckpointError, OSError):
        return None  # `_problem` says why


def _kept(manifests: list[Manifest]) -> dict[int, str]:
    if not manifests:
        return {}
    rule = RetentionRule.from_json(max(manifests, key=lambda manifest: manifest.step).retention)
    return rule.reasons([manifest.step for manifest in manifests], {})


def _problem(entry: Entry, advance: Callable[[int], None]) -> str:
    try:
        return problems_of(entry, advance=advance)[1]
    except CheckpointError as error:
        return str(error)


def _tell_problems(rows: list[_Row]) -> None:
    for row in rows:
        if row.problem:
            tell(f"{Path(row.path).name}: {row.problem}")


def _yes(value: bool) -> str:
    return "yes" if value else "no"


@contextmanager
def _progress(what: str, total: int) -> Iterator[Callable[[int, int], None]]:
    """A bar on stderr where that is a terminal; the function takes bytes more and bytes in all."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=total or None)
        yield lambda count, whole: bar.update(task, advance=count, total=whole)
