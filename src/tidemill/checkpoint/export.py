"""Weights as a folder that `AutoModelForCausalLM.from_pretrained` loads: no missing, no unexpected key.

Whoever calls writes headers and texts; each piece of a tensor is written by whoever holds it, into the final files, so
that every byte is written once and nothing is gathered. Like a checkpoint: a temporary folder, fsync, rename. Needs no
GPU.
"""

import shutil
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from tidemill.checkpoint.base_model import BaseModel, read_base_model
from tidemill.checkpoint.cover import cover_problems
from tidemill.checkpoint.durable import (
    free_bytes,
    fsync_file,
    fsync_folder,
    full_in_words,
    is_full,
    make_folder,
    remove_tree,
    write_durably,
)
from tidemill.checkpoint.export_layout import SHARD_BYTES, ExportLayout, lay_out_export
from tidemill.checkpoint.placing import first_difference, place_pieces
from tidemill.checkpoint.safetensors_file import TensorFile
from tidemill.checkpoint.stored import MODEL_PREFIX
from tidemill.checkpoint.together import together
from tidemill.contracts.checkpoint import Placer, Places, SavedTensor, TensorPlace, TensorSpec
from tidemill.contracts.events import Emit, Notice, Progress
from tidemill.errors import CheckpointError, CheckpointRefused, WorkerError
from tidemill.faults import point
from tidemill.units import format_bytes

__all__ = [
    "MARGIN",
    "WholeTensors",
    "export_model",
    "export_pieces",
    "is_export_of",
    "layout_of",
    "work_folder",
    "write_texts",
]

MARGIN = 1 << 20  # folder entries, block rounding

Advance = Callable[[int], None]


class WholeTensors:
    """Implements Placer over tensors that are whole: what a checkpoint on disk gives."""

    def __init__(self, weights: Mapping[str, SavedTensor]) -> None:
        self._pieces = {MODEL_PREFIX + name: (_whole(tensor), tensor) for name, tensor in weights.items()}

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        """See Placer."""
        return {name: spec for name, (spec, _) in self._pieces.items()}

    def place(self, places: Places, advance: Advance, *, last: bool = False) -> int:
        """See Placer."""
        return place_pieces(self._pieces, places, advance)

    def differing(self, places: Places, advance: Advance) -> str:
        """See Placer."""
        return first_difference(self._pieces, places, advance)


def _whole(tensor: SavedTensor) -> TensorSpec:
    shape = tuple(tensor.shape)
    return TensorSpec(dtype=tensor.dtype, shape=shape, whole=shape, offset=(0,) * len(shape))


def export_model(
    *,
    weights: Mapping[str, SavedTensor],
    base: Path,
    target: Path,
    dtype: str,
    emit: Emit,
    shard_bytes: int = SHARD_BYTES,
) -> Path:
    """As `export_pieces`, of whole tensors by the trainer's name or Hugging Face names, tied ones once or twice."""
    pieces, model = [WholeTensors(weights)], read_base_model(base)
    return export_pieces(pieces=pieces, model=model, target=target, dtype=dtype, emit=emit, shard_bytes=shard_bytes)


def export_pieces(
    *,
    pieces: Sequence[Placer],
    model: BaseModel,
    target: Path,
    dtype: str,
    emit: Emit,
    advance: Advance = lambda count: None,
    last: bool = False,
    shard_bytes: int = SHARD_BYTES,
) -> Path:
    """Write the weights in `pieces`, a rank each, to the new folder `target`, which all of them see.

    `model` gives config, generation config, tokenizer and chat template. `dtype` "auto" is the base's own. `advance` is
    told of bytes written and may raise to stop; `last` as for Placer. Raises CheckpointError, which names the rank that
    failed, or what `advance` raised; then there is no `target`.
    """
    if target.is_symlink() or (target.exists() and (not target.is_dir() or any(target.iterdir()))):
        raise CheckpointRefused(f"cannot export to {target}: it is there already; remove it, or choose another folder")
    layout = layout_of(pieces, model, dtype=dtype, shard_bytes=shard_bytes)
    work = work_folder(target)
    try:
        make_folder(target.parent)
        remove_tree(work)
        _check_room(target.parent, layout)
        point("export.mkdir")
        work.mkdir()
        _begin_files(work, layout)
        _place(work, layout, pieces, _progress(layout.tensor_bytes, advance, emit), last=last)
        write_texts(work, layout)
        point("export.rename")
        work.rename(target)
        _acknowledge(work, target)
    except OSError as error:
        text = _in_words(error, work)
        shutil.rmtree(work, ignore_errors=True)
        raise CheckpointError(f"cannot export to {target}: {text}") from error
    except (CheckpointError, WorkerError) as error:
        shutil.rmtree(work, ignore_errors=True)
        raise CheckpointError(f"cannot export to {target}: {error}") from error
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise
    size = format_bytes(layout.tensor_bytes)
    emit(Notice(text=f"exported {len(layout.specs)} tensors in {layout.dtype} ({size}) to {target}"))
    return target


def _acknowledge(work: Path, target: Path) -> None:
    try:
        point("export.fsync-parent")
        fsync_folder(target.parent)
    except BaseException:
        target.rename(work)
        raise


def layout_of(
    pieces: Sequence[Placer], model: BaseModel, *, dtype: str, shard_bytes: int = SHARD_BYTES
) -> ExportLayout:
    """Of the weights among `pieces`. Raises CheckpointError when they do not make whole tensors that fit the model."""
    held = [
        {name.removeprefix(MODEL_PREFIX): spec for name, spec in one.specs.items() if name.startswith(MODEL_PREFIX)}
        for one in pieces
    ]
    problems = cover_problems((f"rank {number}", specs) for number, specs in enumerate(held))
    if problems:
        raise CheckpointError(f"cannot export: the pieces do not make whole tensors: {'; '.join(problems)}")
    weights = {name: (spec.dtype, spec.whole) for specs in held for name, spec in specs.items()}
    return lay_out_export(weights, model, dtype=dtype, shard_bytes=shard_bytes)


def work_folder(target: Path) -> Path:
    """Where an export is written before it gets its name."""
    return target.with_name(f".{target.name}.tidemill-export")


def is_export_of(target: Path, pieces: Sequence[Placer], model: BaseModel, *, dtype: str) -> bool:
    """Whether `target` holds what `export_pieces` would write there, however it is cut into files: every byte.

    Each rank reads its own pieces. Raises CheckpointError for weights that do not fit the model.
    """
    layout = layout_of(pieces, model, dtype=dtype)
    places: dict[str, TensorPlace] = {}
    try:
        for path in sorted(target.glob("*.safetensors")):
            places |= _places_in(path)
        config = (target / "config.json").read_bytes()
    except (OSError, CheckpointError):
        return False
    if config != layout.texts["config.json"]:
        return False
    if {name: (place.dtype, place.shape) for name, place in places.items()} != layout.specs:
        return False
    wanted = _wanted(layout, places)
    return not any(together([partial(one.differing, wanted) for one in pieces], lambda count: None))


def _places_in(path: Path) -> dict[str, TensorPlace]:
    header = TensorFile(path).header
    return {
        slot.name: TensorPlace(path=path, begin=header.data_start + slot.begin, dtype=slot.dtype, shape=slot.shape)
        for slot in header.slots
    }


def _check_room(folder: Path, layout: ExportLayout) -> None:
    needed, free = layout.total_bytes + MARGIN, free_bytes(folder)
    if free < needed:
        raise CheckpointError(
            f"it needs {format_bytes(needed)} and {format_bytes(free)} are free there; free some, or choose another "
            "folder"
        )


def _begin_files(work: Path, layout: ExportLayout) -> None:
    """Every file with its header and in its full size, for others to write into."""
    for file in layout.files:
        write_durably(work / file.name, file.header, fault="export.open", fsync_fault="export.fsync-header")
        with (work / file.name).open("r+b") as opened:
            opened.truncate(file.bytes)


def _place(work: Path, layout: ExportLayout, pieces: Sequence[Placer], advance: Advance, *, last: bool) -> None:
    wanted = _wanted(layout, layout.places(work))
    twice = {
        MODEL_PREFIX + name: wanted[MODEL_PREFIX + kept]
        for name, kept in layout.model.tied.items()
        if any(MODEL_PREFIX + name in one.specs for one in pieces)
    }
    written = sum(together([partial(one.place, wanted, last=last and not twice) for one in pieces], advance))
    if written != layout.tensor_bytes:
        raise CheckpointError(f"{written} of {layout.tensor_bytes} bytes were written; is a rank missing?")
    # Whoever wrote has synced what it wrote; the sizes are ours.
    for file in layout.files:
        if (size := (work / file.name).stat().st_size) != file.bytes:
            raise CheckpointError(f"{file.name} was written, but has {size} of {file.bytes} bytes here: {_NOT_SHARED}")
        point("export.fsync-whole")
        fsync_file(work / file.name)
    if twice:
        _check_tied(layout, pieces, twice)


_NOT_SHARED = "exports must lie on a file system that every host of the run shares; choose a folder there"


def _wanted(layout: ExportLayout, places: Mapping[str, TensorPlace]) -> Places:
    return {MODEL_PREFIX + name: several for name, several in layout.placed(places).items()}


def _check_tied(layout: ExportLayout, pieces: Sequence[Placer], twice: Places) -> None:
    """Tensors given twice, against the one that was written."""
    kinds = {name: (spec.dtype, spec.whole) for one in pieces for name, spec in one.specs.items()}
    kept = {full: MODEL_PREFIX + layout.model.tied[full.removeprefix(MODEL_PREFIX)] for full in twice}
    other = [full for full in twice if kinds[full] != kinds[kept[full]]]
    other = other or together([partial(one.differing, twice) for one in pieces], lambda count: None)
    for full in filter(None, other):
        name = full.removeprefix(MODEL_PREFIX)
        raise CheckpointError(
            f"{name} and {layout.model.tied[name]} are tied in config.json, but their values differ; untie them there, "
            "or see what the trainer made of them"
        )


def write_texts(work: Path, layout: ExportLayout) -> None:
    """What is no tensor, durably, and the names of all files with it."""
    for name, text in layout.texts.items():
        _write_text(work / name, text)
    for path in layout.model.copied:
        (work / path).parent.mkdir(parents=True, exist_ok=True)
        _write_text(work / path, (layout.model.folder / path).read_bytes())
    point("export.fsync-folder")
    for folder in {work, *((work / path).parent for path in layout.model.copied)}:
        fsync_folder(folder)


def _write_text(path: Path, data: bytes) -> None:
    write_durably(path, data, fault="export.text", fsync_fault="export.fsync-text")


def _progress(total: int, told: Advance, emit: Emit) -> Advance:
    done = 0

    def advance(count: int) -> None:
        nonlocal done
        told(count)
        done += count
        emit(Progress(what="exporting", done=done, total=total))

    return advance


def _in_words(error: OSError, work: Path) -> str:
    if isinstance(error, FileNotFoundError) and work.is_dir():
        return f"who writes a part of it does not see {work} ({error}), which is here: {_NOT_SHARED}"
    if is_full(error):
        return f"{full_in_words(error)} ({error}); free some space or choose another folder"
    return f"it cannot be written ({error}); choose another folder"
