"""A save and an export in small, before the first step: what would fail after hours fails now, and says what to do.

Every kind of file is written by whoever will write it, synced, renamed, read back by what reads a checkpoint, and
removed. Nothing of it has a name that anybody reads, at any moment.
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path

from tidemill.checkpoint.base_model import BaseModel
from tidemill.checkpoint.durable import fsync_folder, make_folder, remove_tree, write_durably
from tidemill.checkpoint.export import work_folder, write_texts
from tidemill.checkpoint.export_layout import ExportLayout
from tidemill.checkpoint.safetensors_header import ITEM_BYTES
from tidemill.checkpoint.staged import Staged, stage
from tidemill.config.tokenizer_files import holds_a_tokenizer, tokenizer_kinds_in_words
from tidemill.contracts.checkpoint import Shard, Snapshot
from tidemill.contracts.events import Emit, Notice
from tidemill.contracts.state import RunState
from tidemill.errors import CheckpointError

__all__ = ["check_texts", "in_small", "try_export"]

_BYTES = 4 << 20  # of each rank's tensors
_GENERATION = "generation_config.json"
_AWAY = "make the folder writable, choose another run.dir, or set checkpoint.export = false"


def in_small(staged: Staged) -> Staged:
    """The same state with the first tensors alone, some MiB of every part and rank; `staged` still is to be released.

    A tensor is there with all of its pieces or not at all. One that is larger than that is passed over.
    """
    snapshots = {
        part: Snapshot(shards=_some([file.shard for file in staged.files if file.part == part]), extra=snapshot.extra)
        for part, snapshot in staged.snapshots.items()
    }
    return stage(RunState.from_json(json.loads(staged.state)["run"]), snapshots)


def _some(shards: Sequence[Shard]) -> list[Shard]:
    taken = [0] * len(shards)
    all_specs = [shard.specs for shard in shards]
    names: list[str] = []
    for name in dict.fromkeys(name for specs in all_specs for name in specs):
        sizes = [
            ITEM_BYTES[specs[name].dtype] * math.prod(specs[name].shape) if name in specs else 0 for specs in all_specs
        ]
        if all(have + size <= _BYTES for have, size in zip(taken, sizes, strict=True)):
            taken = [have + size for have, size in zip(taken, sizes, strict=True)]
            names.append(name)
    return [shard.some(names) for shard in shards]


def check_texts(model: BaseModel, emit: Emit) -> None:
    """What an export will copy. Raises CheckpointError for what nobody could use, and warns of what only is odd."""
    if not holds_a_tokenizer(model.folder):
        raise CheckpointError(
            f"cannot export: {model.folder} has no tokenizer to go with the weights ({tokenizer_kinds_in_words()}); "
            "put it there, or set checkpoint.export = false and checkpoint.export_every = 0"
        )
    if (model.folder / _GENERATION).is_file():
        _check_generation(model.folder, emit)


def _check_generation(folder: Path, emit: Emit) -> None:
    from transformers import GenerationConfig

    try:
        config = GenerationConfig.from_pretrained(folder, local_files_only=True)
    except Exception as error:
        raise CheckpointError(
            f"cannot export: transformers does not read {folder / _GENERATION} ({error}), nor would it read the "
            "export's; mend it, or move it away"
        ) from error
    try:
        config.validate(strict=True)
    except Exception as error:
        lines = "; ".join(line.strip("- ") for line in str(error).splitlines()[1:] if line.startswith("-"))
        text = (
            f"{folder / _GENERATION} contradicts itself: {lines or error}. An export has it byte for byte, but "
            "transformers refuses to save it again: mend it in the base model if that is not meant"
        )
        emit(Notice(text=text, level="warning"))


def try_export(layout: ExportLayout, parent: Path) -> None:
    """Write headers and texts as an export into `parent` would, read them back, and remove them. CheckpointError."""
    work = work_folder(parent / "trial")
    renamed = work_folder(parent / "trial-renamed")
    try:
        make_folder(parent)
        for left in (work, renamed):
            remove_tree(left)
        work.mkdir()
        for file in layout.files:
            write_durably(work / file.name, file.header, fault="export.open", fsync_fault="export.fsync-header")
        write_texts(work, layout)
        work.rename(renamed)
        fsync_folder(parent)
        different = _differing(layout, renamed)
        remove_tree(renamed)
    except OSError as error:
        for left in (work, renamed):
            _remove(left)
        raise CheckpointError(f"cannot export to {parent}: {error}; {_AWAY}") from error
    if different:
        raise CheckpointError(f"cannot export to {parent}: {different} read back is not what was written; see the disk")


def _differing(layout: ExportLayout, folder: Path) -> str:
    wanted = {file.name: file.header for file in layout.files} | dict(layout.texts)
    wanted |= {str(path): (layout.model.folder / path).read_bytes() for path in layout.model.copied}
    return next((name for name, data in wanted.items() if (folder / name).read_bytes() != data), "")


def _remove(folder: Path) -> None:
    try:
        remove_tree(folder)
    except OSError:
        return  # The next start tries again; it has no name that anybody reads.
