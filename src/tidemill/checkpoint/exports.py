"""The model folders of a run: `step-N` in one folder, each written once and never deleted by us."""

import functools
from collections.abc import Callable, Iterable
from pathlib import Path

from tidemill.checkpoint.base_model import BaseModel, read_base_model
from tidemill.checkpoint.catalog import checkpoint_name
from tidemill.checkpoint.durable import free_bytes, remove_tree
from tidemill.checkpoint.export import MARGIN, export_pieces, is_export_of, layout_of
from tidemill.checkpoint.shard import LocalShard
from tidemill.checkpoint.staged import Staged
from tidemill.checkpoint.trial import check_texts, try_export
from tidemill.contracts.checkpoint import Placer, Snapshot
from tidemill.contracts.events import Emit, Notice
from tidemill.errors import CheckpointError
from tidemill.units import format_bytes

__all__ = ["Exports", "NoExports", "RunExports"]

_LEFTOVERS = ".*.tidemill-export"


class RunExports:
    """Exports of a run into `folder`. `every` is in steps, 0 for none beside saves.

    With `at_end` that of `last_step` is not among them: it is the caller's, at the end of the run.
    """

    def __init__(
        self,
        *,
        folder: Path,
        base: Path,
        dtype: str,
        every: int,
        at_end: bool,
        last_step: int,
        emit: Emit,
        free: Callable[[Path], int] = free_bytes,
    ) -> None:
        """`base` and `dtype` as for `export_pieces`; `free` counts the bytes that a folder has room for."""
        self._folder = folder
        self._base = base
        self._dtype = dtype
        self._every = every
        self._not_beside = last_step if at_end else -1
        self._emit = emit
        self._free = free

    @functools.cached_property
    def _model(self) -> BaseModel:
        return read_base_model(self._base)

    def path(self, step: int) -> Path:
        """Where the model of `step` is, or will be."""
        return self._folder / checkpoint_name(step)

    def due(self, step: int) -> bool:
        """Whether a model is written beside the save of `step`."""
        return self._every > 0 and step > 0 and step % self._every == 0 and step != self._not_beside

    def has(self, step: int) -> bool:
        """Whether something is there under its name."""
        path = self.path(step)
        return path.is_dir() and any(path.iterdir())

    def write(
        self,
        step: int,
        snapshots: Iterable[Snapshot],
        advance: Callable[[int], None] = lambda count: None,
        *,
        last: bool = False,
    ) -> Path:
        """Export the weights in `snapshots`; one that is there is kept if it is the same.

        `advance` and `last` as for Placer. Raises CheckpointError, also when another model is there under the name.
        """
        pieces, target = _pieces(snapshots), self.path(step)
        if self.has(step):
            if not is_export_of(target, pieces, self._model, dtype=self._dtype):
                raise CheckpointError(
                    f"cannot export to {target}: it is there already and holds another model or dtype than this run's; "
                    "move it away, and start the same command again"
                )
            self._emit(Notice(text=f"{target} holds this very model already"))
            return target
        return export_pieces(
            pieces=pieces,
            model=self._model,
            target=target,
            dtype=self._dtype,
            emit=self._emit,
            advance=advance,
            last=last,
        )

    def beside(self, staged: Staged, advance: Callable[[int], None]) -> None:
        """Export what was just saved, if it is due; it is read for the last time. Raises as `write`."""
        if self.due(staged.step):
            self.write(staged.step, staged.snapshots.values(), advance, last=True)

    def rehearse(self, snapshots: Iterable[Snapshot], *, saves: Path, save_bytes: int) -> None:
        """Find what keeps the weights from being exported, writing nothing. Raises CheckpointError.

        `saves` is the folder of checkpoints, one of which takes `save_bytes`: there must be room for both.
        """
        layout = layout_of(_pieces(snapshots), self._model, dtype=self._dtype)
        there = _existing(self._folder)
        beside = save_bytes if there.stat().st_dev == _existing(saves).stat().st_dev else 0
        needed, free = layout.total_bytes + MARGIN, self._free(there)
        if free < needed + beside:
            both = f"the export needs {format_bytes(needed)}, a checkpoint beside it {format_bytes(save_bytes)}"
            raise CheckpointError(
                f"cannot export to {self._folder}: {both if beside else f'it needs {format_bytes(needed)}'} and "
                f"{format_bytes(free)} are free there; free some, choose another run.dir, or set checkpoint.export = "
                "false and checkpoint.export_every = 0"
            )

    def attempt(self, snapshots: Iterable[Snapshot]) -> None:
        """Write an export in small, and remove it. Raises CheckpointError."""
        check_texts(self._model, self._emit)
        try_export(layout_of(_pieces(snapshots), self._model, dtype=self._dtype), self._folder)

    def clear(self) -> None:
        """Remove what killed exports left. Only the holder of the run's lock may call it."""
        for path in sorted(self._folder.glob(_LEFTOVERS)):
            try:
                remove_tree(path)
            except OSError as error:
                self._emit(Notice(text=f"cannot remove {path}, left by a killed export: {error}", level="warning"))


class NoExports:
    """For a run that exports nothing."""

    def due(self, step: int) -> bool:
        """Never."""
        return False

    def has(self, step: int) -> bool:
        """Nothing."""
        return False

    def beside(self, staged: Staged, advance: Callable[[int], None]) -> None:
        """Nothing is due."""

    def rehearse(self, snapshots: Iterable[Snapshot], *, saves: Path, save_bytes: int) -> None:
        """Nothing can fail."""

    def attempt(self, snapshots: Iterable[Snapshot]) -> None:
        """Nothing can fail."""

    def clear(self) -> None:
        """Nothing was left."""


Exports = RunExports | NoExports


def _pieces(snapshots: Iterable[Snapshot]) -> list[Placer]:
    """A rank each; of a part in this process, one."""
    found: list[Placer] = []
    for snapshot in snapshots:
        found += snapshot.shards
        if snapshot.tensors:
            found.append(LocalShard(snapshot.tensors, snapshot.written))
    return found


def _existing(folder: Path) -> Path:
    return next(path for path in (folder, *folder.parents) if path.exists())
