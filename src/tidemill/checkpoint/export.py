"""Weights of a run as a folder that `AutoModelForCausalLM.from_pretrained` loads: no missing, no unexpected key.

Names and shapes are compared with the model's own before anything is written. Written like a checkpoint: a temporary
folder, fsync, rename. Needs no GPU, and one tensor's room beyond the weights given, in however many pieces they lie.
"""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from tidemill.checkpoint.base_model import DTYPES, BaseModel, read_base_model
from tidemill.checkpoint.durable import free_bytes, fsync_folder, is_full, make_folder, remove_tree, write_durably
from tidemill.checkpoint.safetensors_file import TensorFile, flat, write_tensors
from tidemill.checkpoint.safetensors_header import ITEM_BYTES, lay_out
from tidemill.contracts.checkpoint import SavedTensor, TensorBytes
from tidemill.contracts.events import Emit, Notice, Progress
from tidemill.errors import CheckpointError, CheckpointRefused
from tidemill.faults import point
from tidemill.units import format_bytes

__all__ = ["export_model", "is_export_of", "rehearse_export"]

SHARD_BYTES = 5_000_000_000
_MARGIN = 1 << 20
_BLOCK_BYTES = 16 << 20

_Specs = dict[str, tuple[str, tuple[int, ...]]]


def export_model(
    *,
    weights: Mapping[str, SavedTensor],
    base: Path,
    target: Path,
    dtype: str,
    emit: Emit,
    shard_bytes: int = SHARD_BYTES,
) -> Path:
    """Write `weights` (Hugging Face names, tied tensors once or twice) to the new folder `target`.

    `base` gives config, generation config, tokenizer and chat template. `dtype` "auto" is the base's own. Raises
    CheckpointError, and then there is no `target`.
    """
    _check_target(target)
    model = read_base_model(base)
    chosen = _chosen(dtype, model)
    _check_tied(weights, model)
    specs = _specs({name: (held.dtype, held.shape) for name, held in weights.items()}, model, DTYPES[chosen])
    shards = _shards(specs, shard_bytes)
    work = target.with_name(f".{target.name}.tidemill-export")
    try:
        make_folder(target.parent)
        remove_tree(work)
        _check_room(target, specs, model)
        point("export.mkdir")
        work.mkdir()
        total = sum(_size(spec) for spec in specs.values())
        _write_shards(work, shards, _reader(weights, specs), _progress(total, emit))
        _write_texts(work, model, chosen)
        point("export.rename")
        work.rename(target)
        point("export.fsync-parent")
        fsync_folder(target.parent)
    except OSError as error:
        shutil.rmtree(work, ignore_errors=True)
        why = "the disk is full" if is_full(error) else "it cannot be written"
        raise CheckpointError(
            f"cannot export to {target}: {why} ({error}); free some space or choose another"
        ) from error
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise
    emit(Notice(text=f"exported {len(specs)} tensors in {chosen} ({format_bytes(total)}) to {target}"))
    return target


def _check_target(target: Path) -> None:
    if target.is_symlink() or (target.exists() and (not target.is_dir() or any(target.iterdir()))):
        raise CheckpointRefused(f"cannot export to {target}: it is there already; remove it, or choose another folder")


def _check_room(target: Path, specs: _Specs, model: BaseModel) -> None:
    texts = sum((model.folder / path).stat().st_size for path in model.copied)
    needed = sum(_size(spec) for spec in specs.values()) + texts + _MARGIN
    free = free_bytes(target.parent)
    if free < needed:
        raise CheckpointError(
            f"cannot export to {target}: it needs {format_bytes(needed)} and {format_bytes(free)} are free there; "
            f"free some, or choose another folder"
        )


def rehearse_export(
    *, weights: Mapping[str, tuple[str, tuple[int, ...]]], base: Path, parent: Path, dtype: str
) -> None:
    """Try all of an export into a new folder in `parent` but the writing of tensors, whose dtypes and shapes suffice.

    Raises CheckpointError.
    """
    model = read_base_model(base)
    specs = _specs(weights, model, DTYPES[_chosen(dtype, model)])
    probe = parent / ".tidemill-export.tmp"
    try:
        for path in model.copied:
            (model.folder / path).read_bytes()
        make_folder(parent)
        remove_tree(probe)
        probe.mkdir()
        _write_text(probe / "probe", b"tidemill")
        probe.rename(parent / ".tidemill-export.renamed.tmp")
        remove_tree(parent / ".tidemill-export.renamed.tmp")
    except OSError as error:
        raise CheckpointError(
            f"cannot export to {parent}: {error}; make the folder writable, or set checkpoint.export = false"
        ) from error
    _check_room(parent / "export", specs, model)


def is_export_of(target: Path, *, weights: Mapping[str, SavedTensor], base: Path, dtype: str) -> bool:
    """Whether `target` holds what `export_model` would write there: every tensor, byte for byte."""
    model = read_base_model(base)
    specs = _specs(
        {name: (held.dtype, held.shape) for name, held in weights.items()}, model, DTYPES[_chosen(dtype, model)]
    )
    found: dict[str, TensorBytes] = {}
    try:
        for path in sorted(target.glob("*.safetensors")):
            found |= TensorFile(path).tensors()
        config = (target / "config.json").read_bytes()
    except (OSError, CheckpointError):
        return False
    if config != model.config_text(_chosen(dtype, model)) or set(found) != set(specs):
        return False
    read = _reader(weights, specs)
    return all(
        (found[name].dtype, found[name].shape) == spec and flat(found[name].data) == flat(read(name))
        for name, spec in specs.items()
    )


def _chosen(dtype: str, model: BaseModel) -> str:
    chosen = model.dtype if dtype == "auto" else dtype
    if chosen not in DTYPES:
        raise CheckpointError(f"cannot export as {dtype!r}: use auto, {', '.join(DTYPES)}")
    return chosen


def _check_tied(weights: Mapping[str, SavedTensor], model: BaseModel) -> None:
    for name in set(weights) & set(model.tied):
        kept = model.tied[name]
        if kept in weights and not _equal(weights[name], weights[kept]):
            raise CheckpointError(f"cannot export: {name} and {kept} are tied in config.json, but their values differ")


def _equal(one: SavedTensor, other: SavedTensor) -> bool:
    """Compared in blocks of rows: the largest tensors of a model are its tied ones."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    if not one.shape:
        return flat(one.data) == flat(other.data)
    rows, width = one.shape[0], one.shape[1:]
    step = max(1, _BLOCK_BYTES // max(1, _size((one.dtype, width))))
    for row in range(0, rows, step):
        offset, shape = (row, *(0 for _ in width)), (min(step, rows - row), *width)
        if one.read(offset, shape) != other.read(offset, shape):
            return False
    return True


def _specs(weights: Mapping[str, tuple[str, tuple[int, ...]]], model: BaseModel, dtype: str) -> _Specs:
    """Dtype and shape of each tensor to write, in the model's order. Raises CheckpointError on any disagreement."""
    missing = sorted(set(model.shapes) - set(weights))
    unexpected = sorted(set(weights) - set(model.shapes) - set(model.tied))
    if missing or unexpected:
        raise CheckpointError(
            f"cannot export: the weights do not fit the model in {model.folder}: {len(missing)} missing "
            f"({', '.join(missing[:3]) or 'none'}), {len(unexpected)} unexpected "
            f"({', '.join(unexpected[:3]) or 'none'})"
        )
    floats = DTYPES.values()
    specs: _Specs = {}
    for name, shape in model.shapes.items():
        held_dtype, held = weights[name]
        padded = held[:1] > (model.vocab_size,) == shape[:1] and held[1:] == shape[1:]
        if held != shape and not padded:
            raise CheckpointError(
                f"cannot export: {name} has shape {list(held)}, the model in {model.folder} wants {list(shape)}"
            )
        specs[name] = (dtype if held_dtype in floats else held_dtype, shape)
    return specs


def _size(spec: tuple[str, tuple[int, ...]]) -> int:
    return lay_out({"": spec})[0].end


def _shards(specs: _Specs, limit: int) -> list[_Specs]:
    """Tensors in order, as many to a shard as stay within `limit` bytes; a larger one has a shard for itself."""
    shards: list[_Specs] = [{}]
    filled = 0
    for name, spec in specs.items():
        if shards[-1] and filled + _size(spec) > limit:
            shards.append({})
            filled = 0
        shards[-1][name] = spec
        filled += _size(spec)
    return shards


def _reader(weights: Mapping[str, SavedTensor], specs: _Specs) -> Callable[[str], memoryview]:
    def read(name: str) -> memoryview:
        held, (dtype, shape) = weights[name], specs[name]
        # Rows that pad the vocabulary are the last ones.
        data = held.read((0,) * len(shape), shape)
        return data if held.dtype == dtype else _cast(data, held.dtype, dtype)

    return read


def _cast(data: memoryview, held: str, wanted: str) -> memoryview:
    """Rounded to nearest, ties to even, as torch does."""
    import torch

    by_name = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
    if not len(data):
        return data
    values = torch.frombuffer(bytearray(data), dtype=by_name[held]).to(by_name[wanted])
    assert values.element_size() == ITEM_BYTES[wanted]
    raw: memoryview = values.view(torch.uint8).numpy().data
    return raw


def _progress(total: int, emit: Emit) -> Callable[[int], None]:
    done = 0

    def advance(count: int) -> None:
        nonlocal done
        done += count
        emit(Progress(what="exporting", done=done, total=total))

    return advance


def _write_shards(
    work: Path, shards: list[_Specs], read: Callable[[str], memoryview], advance: Callable[[int], None]
) -> None:
    count = len(shards)
    files = (
        ["model.safetensors"]
        if count == 1
        else [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
    )
    for file, specs in zip(files, shards, strict=True):
        write_tensors(
            work / file,
            lay_out(specs),
            lambda name: (read(name),),
            metadata={"format": "pt"},
            faults="export",
            advance=advance,
        )
    if count == 1:
        return
    total = sum(_size(spec) for specs in shards for spec in specs.values())
    places = {name: file for file, specs in zip(files, shards, strict=True) for name in specs}
    index = json.dumps({"metadata": {"total_size": total}, "weight_map": places}, indent=2).encode()
    _write_text(work / "model.safetensors.index.json", index)


def _write_texts(work: Path, model: BaseModel, dtype: str) -> None:
    _write_text(work / "config.json", model.config_text(dtype))
    for path in model.copied:
        (work / path).parent.mkdir(parents=True, exist_ok=True)
        _write_text(work / path, (model.folder / path).read_bytes())
    point("export.fsync-folder")
    for folder in {work, *((work / path).parent for path in model.copied)}:
        fsync_folder(folder)


def _write_text(path: Path, data: bytes) -> None:
    write_durably(path, data, fault="export.text", fsync_fault="export.fsync-text")
