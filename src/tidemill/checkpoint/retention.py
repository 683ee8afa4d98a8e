"""Which checkpoints stay, and how the others go: only after a newer one is durable, and never the newest complete one.

A checkpoint that goes is first renamed, so that no reader can take a half-deleted one for whole. What cannot be
deleted is a warning and is tried again at the next save.
"""

import time
from collections.abc import Collection
from pathlib import Path

from tidemill.checkpoint.catalog import Entry, clean_leftovers, entries, trash_folder
from tidemill.checkpoint.durable import fsync_folder, remove_tree
from tidemill.contracts.events import CheckpointEvent, Emit, Notice
from tidemill.faults import point

__all__ = ["prune", "reasons_to_keep"]


def reasons_to_keep(steps: Collection[int], *, keep_last: int, keep_every: int) -> dict[int, str]:
    """Why each step that stays does. `keep_last` 0 keeps all; `keep_every` 0 keeps none for its number."""
    ordered = sorted(set(steps))
    reasons: dict[int, str] = {}
    for step in ordered:
        if keep_every and step % keep_every == 0:
            reasons[step] = f"a multiple of {keep_every}"
    for step in ordered if keep_last == 0 else ordered[-keep_last:]:
        reasons[step] = "all are kept" if keep_last == 0 else f"one of the last {keep_last}"
    if ordered:
        reasons[ordered[-1]] = "the newest"
    return reasons


def prune(folder: Path, *, newest: int, keep_last: int, keep_every: int, attempt: int, emit: Emit) -> None:
    """Delete what need not stay now that step `newest` is durable. Later and incomplete ones are not touched."""
    candidates = [entry for entry in entries(folder) if entry.step <= newest and entry.complete]
    kept = reasons_to_keep([entry.step for entry in candidates], keep_last=keep_last, keep_every=keep_every)
    clean_leftovers(folder, emit)
    for entry in candidates:
        if entry.step not in kept:
            _delete(entry, attempt, emit)


def _delete(entry: Entry, attempt: int, emit: Emit) -> None:
    began, trash = time.perf_counter(), trash_folder(entry, attempt)
    try:
        point("checkpoint.retention.rename")
        entry.path.rename(trash)
        point("checkpoint.retention.fsync")
        fsync_folder(trash.parent)
        point("checkpoint.retention.unlink")
        remove_tree(trash)
    except OSError as error:
        text = f"cannot delete the old checkpoint {entry.path}: {error}; it is tried again at the next save"
        emit(Notice(text=text, level="warning"))
        return
    emit(
        CheckpointEvent(
            time=time.time(),
            status="pruned",
            step=entry.step,
            path=str(entry.path),
            seconds=time.perf_counter() - began,
        )
    )
