"""One checkpoint on its way to the disk: all of it, or nothing that anyone would read.

Order: attempt folder; every file written and fsynced; manifest written last and fsynced; folder fsynced; renamed to
its final name, which must be free; parent fsynced; acknowledged. Whatever fails before the acknowledgement removes
the attempt and leaves all older checkpoints as they were.
"""

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tidemill.checkpoint.catalog import attempt_folder, checkpoint_name
from tidemill.checkpoint.durable import free_bytes, fsync_folder, is_full, remove_tree, write_durably
from tidemill.checkpoint.manifest import MANIFEST, STATE, FileEntry, Manifest, Slice, library_versions
from tidemill.checkpoint.safetensors_file import checksum, file_size, slots_of, write_tensors
from tidemill.checkpoint.safetensors_header import Slot
from tidemill.contracts.checkpoint import Snapshot
from tidemill.contracts.state import RunState
from tidemill.errors import CheckpointError
from tidemill.faults import point
from tidemill.units import format_bytes

__all__ = ["Committer", "Staged", "stage"]

_MARGIN = 1 << 20  # manifest, folder entries, block rounding


@dataclass(frozen=True, kw_only=True, eq=False)
class Staged:
    """A state in host memory, laid out and ready to be written. `total_bytes` is what its files will take."""

    step: int
    snapshots: Mapping[str, Snapshot]
    slots: Mapping[str, tuple[Slot, ...]]
    state: bytes
    total_bytes: int

    def release(self) -> None:
        """Let go of the snapshots; may be called twice."""
        for snapshot in self.snapshots.values():
            snapshot.release()


def stage(state: RunState, snapshots: Mapping[str, Snapshot]) -> Staged:
    """Lay out `snapshots`, by part. Raises CheckpointError when one of them cannot be written."""
    slots = {name: slots_of(snapshot.tensors) for name, snapshot in snapshots.items() if snapshot.tensors}
    extras = {name: dict(snapshot.extra) for name, snapshot in snapshots.items()}
    for name, extra in extras.items():
        try:
            json.dumps(extra)
        except (TypeError, ValueError, RecursionError) as error:
            raise CheckpointError(f"cannot save the part {name}: its `extra` is not JSON ({error})") from None
    text = json.dumps({"run": state.to_json(), "parts": extras}, indent=1).encode()
    size = len(text) + sum(file_size(part) for part in slots.values())
    return Staged(step=state.step, snapshots=snapshots, slots=slots, state=text, total_bytes=size)


@dataclass(frozen=True, kw_only=True)
class Committer:
    """Writes checkpoints of one run and attempt into `folder`. `free` counts the bytes that a folder has room for."""

    folder: Path
    attempt: int
    identity: Mapping[str, str]
    settings: Mapping[str, Any]
    retention: Mapping[str, int]
    free: Callable[[Path], int] = free_bytes

    def rehearse(self, staged: Staged) -> None:
        """Try all of `commit` that writes nothing. Raises CheckpointError."""
        self._manifest(staged, ())
        self.check_room(staged)

    def check_room(self, staged: Staged) -> None:
        """Raises CheckpointError when the file system of the folder has no room for one more such checkpoint."""
        free, needed = self.free(self.folder), staged.total_bytes + _MARGIN
        if free < needed:
            raise CheckpointError(self._no_room(staged, f"{format_bytes(free)} are free there"))

    def commit(self, staged: Staged, advance: Callable[[int], None]) -> Path:
        """Write `staged`; the final path, once it is durable. `advance` is told of bytes written and may raise to stop.

        Raises CheckpointError, or what `advance` raised; then nothing of the attempt is left, unless it says so.
        """
        final = self.folder / checkpoint_name(staged.step)
        work = attempt_folder(self.folder, staged.step, self.attempt)
        if final.exists() or final.is_symlink():
            raise CheckpointError(
                f"cannot save step {staged.step}: {final} is there already; resume from it, or move it away"
            )
        self.check_room(staged)
        try:
            remove_tree(work)
            self._write(work, staged, advance)
            self._publish(work, final, advance)
        except OSError as error:
            left = self._undo(work, final)
            if is_full(error):
                raise CheckpointError(self._no_room(staged, f"the disk is full ({error}){left}")) from error
            raise CheckpointError(f"cannot save step {staged.step} in {self.folder}: {error}{left}") from error
        except Exception as error:
            left = self._undo(work, final)
            error.add_note(f"while step {staged.step} was saved in {self.folder}{left}")
            raise
        return final

    def _write(self, work: Path, staged: Staged, advance: Callable[[int], None]) -> None:
        point("checkpoint.mkdir")
        work.mkdir()
        files = [self._write_part(work, staged, part, advance) for part in staged.slots]
        write_durably(work / STATE, staged.state, fault="checkpoint.state", fsync_fault="checkpoint.fsync-state")
        files.append(FileEntry(STATE, "", len(staged.state), checksum(staged.state), ()))
        write_durably(
            work / MANIFEST,
            self._manifest(staged, tuple(files)),
            fault="checkpoint.manifest",
            fsync_fault="checkpoint.fsync-manifest",
        )
        point("checkpoint.fsync-attempt")
        fsync_folder(work)

    def _manifest(self, staged: Staged, files: tuple[FileEntry, ...]) -> bytes:
        manifest = Manifest(
            step=staged.step,
            attempt=self.attempt,
            parts=tuple(sorted(staged.snapshots)),
            files=files,
            identity=self.identity,
            settings=self.settings,
            retention=self.retention,
            versions=library_versions(),
            time=time.time(),
        )
        try:
            return manifest.to_bytes()
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"cannot save the settings or the identity of the run: {error}") from None

    def _write_part(self, work: Path, staged: Staged, part: str, advance: Callable[[int], None]) -> FileEntry:
        name, slots = f"{part}-00000-of-00001.safetensors", staged.slots[part]
        tensors = staged.snapshots[part].tensors
        sums = write_tensors(
            work / name,
            slots,
            lambda tensor: tensors[tensor].data,
            metadata={},
            faults="checkpoint",
            advance=advance,
        )
        start = file_size(slots) - (slots[-1].end if slots else 0)
        slices = tuple(
            Slice(
                name=slot.name,
                dtype=slot.dtype,
                global_shape=slot.shape,
                offset=(0,) * len(slot.shape),
                local_shape=slot.shape,
                begin=start + slot.begin,
                end=start + slot.end,
                xxh3=sums[slot.name],
            )
            for slot in slots
        )
        return FileEntry(name, part, file_size(slots), "", slices)

    def _publish(self, work: Path, final: Path, advance: Callable[[int], None]) -> None:
        advance(0)
        point("checkpoint.rename")
        work.rename(final)
        point("checkpoint.fsync-parent")
        fsync_folder(self.folder)
        point("checkpoint.acknowledged")

    def _undo(self, work: Path, final: Path) -> str:
        """Remove the attempt wherever it is; what to add to the message when that failed too."""
        try:
            if final.exists():
                final.rename(work)
            remove_tree(work)
        except OSError as error:
            return f", and what was written is still in {work} because it cannot be removed ({error})"
        return ""

    def _no_room(self, staged: Staged, why: str) -> str:
        return (
            f"cannot save step {staged.step} in {self.folder}: it needs {format_bytes(staged.total_bytes + _MARGIN)} "
            f"({staged.total_bytes} bytes and a margin) and {why}; free some, lower checkpoint.keep_last, or choose "
            f"another run.dir"
        )
