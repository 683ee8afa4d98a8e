"""One checkpoint on its way to the disk: all of it, or nothing that anyone would read.

Order: attempt folder; every file written and fsynced, all at the same time, each by whoever holds its pieces; all
found here, with pieces that make whole tensors; manifest written last and fsynced; folder fsynced; renamed to its
final name, which must be free; parent fsynced; acknowledged. Whatever fails before the acknowledgement removes the
attempt and leaves all older checkpoints as they were.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tidemill.checkpoint.blocks import block_count
from tidemill.checkpoint.catalog import attempt_folder, checkpoint_name
from tidemill.checkpoint.cover import cover_problems
from tidemill.checkpoint.durable import free_bytes, fsync_folder, full_in_words, is_full, remove_tree, write_durably
from tidemill.checkpoint.manifest import MANIFEST, STATE, FileEntry, Manifest, library_versions
from tidemill.checkpoint.safetensors_file import checksum
from tidemill.checkpoint.staged import Staged, StagedFile
from tidemill.checkpoint.stored import MODEL_PREFIX, BrokenCheckpointError, read_checkpoint
from tidemill.checkpoint.together import together
from tidemill.errors import CheckpointError, WorkerError
from tidemill.faults import point, skipped
from tidemill.units import format_bytes

__all__ = ["Committer"]

_MARGIN = 1 << 20  # manifest, folder entries, block rounding
_BUFFERED = "takes no direct writes (O_DIRECT): checkpoints are written through the page cache, which is slower"
_NOT_SHARED = "checkpoints must lie on a file system that every host of the run shares; set run.dir to a folder there"


@dataclass(frozen=True, kw_only=True)
class Committer:
    """Writes checkpoints of one run and attempt into `folder`. `free` counts the bytes that a folder has room for.

    `tell` is told, at each save, of what makes it slower than the disk. `read_again` says of which steps the weights
    are read once more behind the save; all else is let go of piece by piece.
    """

    folder: Path
    attempt: int
    identity: Mapping[str, str]
    settings: Mapping[str, Any]
    retention: Mapping[str, Any]
    free: Callable[[Path], int] = free_bytes
    tell: Callable[[str], None] = lambda text: None
    read_again: Callable[[int], bool] = lambda step: False

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
        if (final.exists() or final.is_symlink()) and not skipped("checkpoint.free-name"):
            raise CheckpointError(
                f"cannot save step {staged.step}: {final} is there already; resume from it, or move it away"
            )
        self.check_room(staged)
        self._commit(staged, work, final, advance)
        return final

    def try_out(self, small: Staged) -> None:
        """Do with `small` all that `commit` does, under names that nobody reads; read it back, and remove it.

        Raises CheckpointError.
        """
        work = attempt_folder(self.folder, small.step, self.attempt)
        final = self.folder / f"{checkpoint_name(small.step)}.{self.attempt}-1.tmp"
        try:
            remove_tree(final)
            self._commit(small, work, final, lambda count: None)
            read_checkpoint(final, step=small.step)
        except BrokenCheckpointError as error:
            raise CheckpointError(
                f"cannot save in {self.folder}: a save on trial was read back as something else ({error}); see the disk"
            ) from error
        finally:
            remove_tree(final)

    def _commit(self, staged: Staged, work: Path, final: Path, advance: Callable[[int], None]) -> None:
        try:
            remove_tree(work)
            self._write(work, staged, advance)
            self._publish(work, final, advance)
        except OSError as error:
            left = self._undo(work, final)
            if is_full(error):
                raise CheckpointError(self._no_room(staged, f"{full_in_words(error)} ({error}){left}")) from error
            raise CheckpointError(f"cannot save step {staged.step} in {self.folder}: {error}{left}") from error
        except (CheckpointError, WorkerError) as error:
            left = self._undo(work, final)
            raise CheckpointError(f"cannot save step {staged.step} in {self.folder}: {error}{left}") from error
        except Exception as error:
            left = self._undo(work, final)
            error.add_note(f"while step {staged.step} was saved in {self.folder}{left}")
            raise

    def _write(self, work: Path, staged: Staged, advance: Callable[[int], None]) -> None:
        point("checkpoint.mkdir")
        work.mkdir()
        keeps = self.read_again(staged.step)
        slow: list[str] = []
        jobs = [partial(self._write_file, work, file, slow, keeps=keeps) for file in staged.files]
        files = together(jobs, advance)
        if slow:
            self.tell(f"{self.folder} {_BUFFERED}")
        _check_whole(staged, files)
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

    def _write_file(
        self, work: Path, file: StagedFile, slow: list[str], advance: Callable[[int], None], *, keeps: bool
    ) -> FileEntry:
        """`slow` gets the name of a file that was not written past the page cache."""
        path = work / file.name
        last = [name for name in file.specs if not (keeps and name.startswith(MODEL_PREFIX))]
        try:
            written = file.shard.write(path, advance, last=last)
        except FileNotFoundError as error:
            if not work.is_dir():
                raise
            raise CheckpointError(
                f"whoever writes {file.name} does not see {work} ({error}), which is here: {_NOT_SHARED}"
            ) from error
        except OSError as error:
            error.filename = error.filename or str(path)
            raise
        try:
            size = path.stat().st_size
        except FileNotFoundError:
            raise CheckpointError(f"{file.name} was written, but {work} does not hold it here: {_NOT_SHARED}") from None
        if size != file.bytes:
            raise CheckpointError(f"{file.name} was written, but has {size} of {file.bytes} bytes here: {_NOT_SHARED}")
        if _begin_of(path, len(file.layout.header)) != file.layout.header or len(written.blocks) != block_count(size):
            raise CheckpointError(f"{file.name} was written with other tensors than those that were to be saved")
        if not written.direct:
            slow.append(file.name)
        return file.entry(written.blocks)

    def _publish(self, work: Path, final: Path, advance: Callable[[int], None]) -> None:
        advance(0)
        point("checkpoint.rename")
        work.rename(final)
        point("checkpoint.fsync-parent")
        if not skipped("checkpoint.fsync-parent"):
            fsync_folder(self.folder)
        point("checkpoint.acknowledged")

    def _undo(self, work: Path, final: Path) -> str:
        """Remove the attempt wherever it is; what to add to the message when that failed too."""
        try:
            if final.exists():
                final.rename(work)
                # Or a power cut could leave the checkpoint's name to what is half removed.
                fsync_folder(self.folder)
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


def _begin_of(path: Path, size: int) -> bytes:
    with path.open("rb") as file:
        return file.read(size)


def _check_whole(staged: Staged, files: Sequence[FileEntry]) -> None:
    """By what the manifest will say."""
    for part in staged.snapshots:
        problems = cover_problems((entry.name, entry.specs) for entry in files if entry.part == part)
        if problems:
            raise CheckpointError(f"the pieces of {part} do not make whole tensors: {'; '.join(problems)}")
