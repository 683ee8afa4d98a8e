"""Which checkpoints stay, and how the others go: only after a newer one is durable, and never the newest complete one.

A checkpoint that goes is first renamed, so that no reader can take a half-deleted one for whole. What cannot be
deleted is a warning and is tried again at the next save. A folder that is a link is somebody else's and stays.
"""

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self

from tidemill.checkpoint.catalog import Entry, clean_leftovers, entries, trash_folder
from tidemill.checkpoint.durable import fsync_folder, remove_tree
from tidemill.contracts.events import CheckpointEvent, Emit, Notice
from tidemill.faults import point

__all__ = ["Measured", "NothingMeasured", "Retention", "RetentionRule", "candidates", "folder_bytes"]


class Measured(Protocol):
    """What was recorded of one number, by the step whose weights it is about."""

    def values(self) -> Mapping[int, float]:
        """Of each step for which it was recorded and finite. Raises OSError."""
        ...

    def names(self) -> Sequence[str]:
        """Of all numbers that were recorded, sorted. Raises OSError."""
        ...


class NothingMeasured:
    """Implements Measured for a rule that asks for no number."""

    def values(self) -> Mapping[int, float]:
        """None."""
        return {}

    def names(self) -> Sequence[str]:
        """None."""
        return ()


@dataclass(frozen=True, kw_only=True)
class RetentionRule:
    """What stays: the last so many (0 keeps all), multiples (0 for none), the best by a number, and `named` steps.

    `keep_best` names a number whose greatest value is best, or with a `-` before the name its smallest.
    """

    keep_last: int
    keep_every: int = 0
    keep_best: str = ""
    named: frozenset[int] = frozenset()

    @property
    def metric(self) -> str:
        """The number that `keep_best` goes by; empty for none."""
        return self.keep_best.removeprefix("-")

    def reasons(self, steps: Collection[int], values: Mapping[int, float]) -> dict[int, str]:
        """Why each step that stays does. The newest always does. Of equal values the newer one is best."""
        ordered = sorted(set(steps))
        found: dict[int, list[str]] = {}
        last = ordered if self.keep_last == 0 else ordered[-self.keep_last :]
        for step in last:
            found[step] = ["all are kept" if self.keep_last == 0 else f"one of the last {self.keep_last}"]
        for step in ordered[-1:]:
            found[step] = ["the newest"]
        for step in ordered:
            if self.keep_every and step % self.keep_every == 0:
                found.setdefault(step, []).append(f"a multiple of {self.keep_every}")
            if step in self.named:
                found.setdefault(step, []).append("named")
        measured = [step for step in ordered if self.metric and values.get(step) is not None]
        if measured:
            sign = -1 if self.keep_best.startswith("-") else 1
            best = max(measured, key=lambda step: (sign * values[step], step))
            found.setdefault(best, []).append(f"the best by {self.keep_best} ({values[best]:g})")
        return {step: ", ".join(why) for step, why in sorted(found.items())}

    def to_json(self) -> dict[str, Any]:
        """As a manifest says it. Steps that a person named are no rule and are left out."""
        return {"keep_last": self.keep_last, "keep_every": self.keep_every, "keep_best": self.keep_best}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """The rule of a manifest, of an earlier release too; what it does not say keeps all, and asks for no number."""
        return cls(
            keep_last=int(data.get("keep_last", 0)),
            keep_every=int(data.get("keep_every", 0)),
            keep_best=str(data.get("keep_best", "")),
        )


def candidates(folder: Path, *, newest: int) -> list[Entry]:
    """What a rule may choose among: complete ones up to step `newest`, links left out, oldest first."""
    found = entries(folder)
    return [entry for entry in found if entry.step <= newest and entry.complete and not entry.path.is_symlink()]


def folder_bytes(folder: Path) -> int:
    """Size of all files below `folder`; what disappears meanwhile does not count."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.lstat().st_size if path.is_file() else 0
        except OSError:
            continue
    return total


class Retention:
    """Deletes by a rule in one folder. Only the holder of the run's lock may call it."""

    def __init__(
        self,
        folder: Path,
        *,
        rule: RetentionRule,
        attempt: int,
        emit: Emit,
        measured: Measured | None = None,
    ) -> None:
        """`measured` is the number that the rule's `keep_best` names."""
        self._folder, self._rule, self._attempt, self._emit = folder, rule, attempt, emit
        self._measured: Measured = measured or NothingMeasured()
        self._looked = False

    def __call__(self, newest: int) -> list[int]:
        """Delete what need not stay now that step `newest` is durable; the steps that went.

        Later and incomplete ones are not touched. When the rule's number cannot be read, nothing goes this time.
        """
        try:
            values = self._measured.values() if self._rule.metric else {}
            self._look(newest, values)
        except OSError as error:
            text = f"cannot tell which checkpoint is the best by {self._rule.keep_best}: {error}; none is deleted now"
            self._emit(Notice(text=text, level="warning"))
            return []
        held = candidates(self._folder, newest=newest)
        kept = self._rule.reasons([entry.step for entry in held], values)
        clean_leftovers(self._folder, self._emit)
        return [entry.step for entry in held if entry.step not in kept and self._delete(entry)]

    def _look(self, newest: int, values: Mapping[int, float]) -> None:
        """Once: whether anything of the name is recorded at all."""
        if self._looked or not self._rule.metric:
            return
        self._looked = True
        if not values:
            names = ", ".join(self._measured.names()) or "nothing at all yet"
            text = (
                f'checkpoint.keep_best = "{self._rule.keep_best}": nothing of that name was recorded up to step '
                f"{newest}, so no checkpoint is kept for it so far; recorded are: {names}"
            )
            self._emit(Notice(text=text, level="warning"))

    def _delete(self, entry: Entry) -> bool:
        began, trash = time.perf_counter(), trash_folder(entry, self._attempt)
        try:
            size = folder_bytes(entry.path)
            point("checkpoint.retention.rename")
            entry.path.rename(trash)
            point("checkpoint.retention.fsync")
            fsync_folder(trash.parent)
            point("checkpoint.retention.unlink")
            remove_tree(trash)
        except OSError as error:
            text = f"cannot delete the old checkpoint {entry.path}: {error}; it is tried again at the next save"
            self._emit(Notice(text=text, level="warning"))
            return False
        self._emit(
            CheckpointEvent(
                time=time.time(),
                status="pruned",
                step=entry.step,
                path=str(entry.path),
                bytes=size,
                seconds=time.perf_counter() - began,
            )
        )
        return True
