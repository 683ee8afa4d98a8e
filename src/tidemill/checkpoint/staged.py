"""A state on its way to the disk: every file laid out before anything is written."""

import contextlib
import json
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial

from tidemill.checkpoint.cover import cover_problems
from tidemill.checkpoint.manifest import FileEntry, Slice, Slices, shard_file
from tidemill.checkpoint.safetensors_header import lay_out, pack_header
from tidemill.checkpoint.shard import FileLayout, LocalShard
from tidemill.contracts.checkpoint import Shard, Snapshot, TensorSpec
from tidemill.contracts.state import RunState
from tidemill.errors import CheckpointError

__all__ = ["Staged", "StagedFile", "Stager", "release_after", "stage"]


@dataclass(frozen=True, kw_only=True, eq=False)
class StagedFile:
    """One shard of one part: what its file will be, known from the specs of its pieces alone.

    `slices` is the manifest's account of its tensors, made when it is first asked for.
    """

    name: str
    part: str
    shard: Shard
    specs: Mapping[str, TensorSpec]
    layout: FileLayout
    slices: Callable[[], Slices]

    @property
    def bytes(self) -> int:
        """Of the whole file."""
        return self.layout.bytes

    def entry(self, blocks: tuple[str, ...]) -> FileEntry:
        """The manifest's account of it, with the checksums of its blocks."""
        return FileEntry(self.name, self.part, self.bytes, "", self.slices(), blocks)


def _slices(layout: FileLayout, specs: Mapping[str, TensorSpec]) -> Slices:
    start = len(layout.header)
    return Slices(
        Slice(
            name=slot.name,
            dtype=slot.dtype,
            global_shape=specs[slot.name].whole,
            offset=specs[slot.name].offset,
            local_shape=slot.shape,
            begin=start + slot.begin,
            end=start + slot.end,
        )
        for slot in layout.slots
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class Staged:
    """A state in host memory, laid out and ready to be written. `total_bytes` is what its files will take."""

    step: int
    snapshots: Mapping[str, Snapshot]
    files: tuple[StagedFile, ...]
    state: bytes
    total_bytes: int

    def release(self) -> None:
        """Let go of all snapshots, whichever of them fails to; may be called twice."""
        with contextlib.ExitStack() as stack:
            for snapshot in self.snapshots.values():
                stack.callback(snapshot.release)


def release_after(error: BaseException, snapshots: Iterable[Snapshot]) -> None:
    """Let go of all `snapshots` because of `error`, which is to be raised on: what fails here is a note to it."""
    for snapshot in snapshots:
        try:
            snapshot.release()
        except Exception as second:
            error.add_note(f"and a snapshot could not be released: {second!r}")


def stage(state: RunState, snapshots: Mapping[str, Snapshot]) -> Staged:
    """As a Stager does, once."""
    return Stager()(state, snapshots)


class Stager:
    """Lays snapshots out, by part; not anew where a layout is the one before: the loop waits for this."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[Hashable, Sequence[StagedFile]]] = {}

    def __call__(self, state: RunState, snapshots: Mapping[str, Snapshot]) -> Staged:
        """Raises CheckpointError when one of `snapshots` cannot be written, or is not whole."""
        files = tuple(file for part, snapshot in snapshots.items() for file in self._files(part, snapshot))
        extras = ", ".join(f"{json.dumps(part)}: {_extra(part, snapshot)}" for part, snapshot in snapshots.items())
        text = f'{{"run": {json.dumps(state.to_json())}, "parts": {{{extras}}}}}'.encode()
        size = len(text) + sum(file.bytes for file in files)
        return Staged(step=state.step, snapshots=snapshots, files=files, state=text, total_bytes=size)

    def _files(self, part: str, snapshot: Snapshot) -> Sequence[StagedFile]:
        layout, known = self._known.get(part, (None, ()))
        if layout is None or layout != snapshot.layout:
            known = _laid_out(part, snapshot)
            self._known[part] = snapshot.layout, known
            return known
        if snapshot.tensors:
            return [replace(file, shard=LocalShard(snapshot.tensors, snapshot.written, file.layout)) for file in known]
        return [replace(file, shard=shard) for file, shard in zip(known, snapshot.shards, strict=True)]


def _extra(part: str, snapshot: Snapshot) -> str:
    try:
        return json.dumps(dict(snapshot.extra))
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"cannot save the part {part}: its `extra` is not JSON ({error})") from None


def _shards(snapshot: Snapshot) -> Sequence[Shard]:
    return [LocalShard(snapshot.tensors, snapshot.written)] if snapshot.tensors else snapshot.shards


def _laid_out(part: str, snapshot: Snapshot) -> list[StagedFile]:
    if snapshot.tensors and snapshot.shards:
        raise CheckpointError(
            f"cannot save the part {part}: its snapshot has both tensors and shards; give one of them"
        )
    shards = _shards(snapshot)
    files = [_file(part, index, len(shards), shard) for index, shard in enumerate(shards)]
    problems = cover_problems((file.name, file.specs) for file in files)
    if problems:
        raise CheckpointError(
            f"cannot save the part {part}: the pieces in its {len(shards)} shard(s) do not make whole tensors: "
            f"{'; '.join(problems)}; is a rank missing, or are there two of one?"
        )
    return files


def _file(part: str, index: int, count: int, shard: Shard) -> StagedFile:
    specs = shard.specs
    layout = shard.layout if isinstance(shard, LocalShard) else _layout_for(specs)
    name = shard_file(part, index, count)
    slices = cache(partial(_slices, layout, specs))
    return StagedFile(name=name, part=part, shard=shard, specs=specs, layout=layout, slices=slices)


def _layout_for(specs: Mapping[str, TensorSpec]) -> FileLayout:
    slots = lay_out({name: (spec.dtype, spec.shape) for name, spec in specs.items()})
    return FileLayout(slots, pack_header(slots, {}))
