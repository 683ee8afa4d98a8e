"""What an exported model will be, known from names, dtypes and shapes alone: its files, and where in them each tensor.

Names and shapes are compared with the model's own. Tied tensors have one place, rows that pad the vocabulary have none.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tidemill.checkpoint.base_model import DTYPES, BaseModel
from tidemill.checkpoint.safetensors_header import ITEM_BYTES, lay_out, pack_header
from tidemill.contracts.checkpoint import TensorPlace
from tidemill.errors import CheckpointError
from tidemill.names.naming import Cut, whole

__all__ = ["INDEX", "SHARD_BYTES", "ExportFile", "ExportLayout", "Specs", "lay_out_export"]

SHARD_BYTES = 5_000_000_000
INDEX = "model.safetensors.index.json"

Specs = Mapping[str, tuple[str, tuple[int, ...]]]
"""Dtype, by safetensors' name, and shape of each tensor by its name."""


@dataclass(frozen=True, kw_only=True)
class ExportFile:
    """A safetensors file: its header, its whole size, and where each tensor of it begins, in bytes from its start."""

    name: str
    header: bytes
    bytes: int
    begins: Mapping[str, int]


@dataclass(frozen=True, kw_only=True)
class ExportLayout:
    """`specs` are the tensors as they will be, by Hugging Face name, `dtype` the precision of those that are floats.

    `cuts` has, by the name of each tensor that was given, what it is written as.
    """

    model: BaseModel
    dtype: str
    specs: Specs
    cuts: Mapping[str, Sequence[Cut]]
    files: tuple[ExportFile, ...]
    texts: Mapping[str, bytes]

    @property
    def tensor_bytes(self) -> int:
        """Bytes of all tensors, each counted once."""
        return sum(_size(spec) for spec in self.specs.values())

    @property
    def total_bytes(self) -> int:
        """What the folder will take."""
        copied = sum((self.model.folder / path).stat().st_size for path in self.model.copied)
        return copied + sum(file.bytes for file in self.files) + sum(len(text) for text in self.texts.values())

    def places(self, folder: Path) -> dict[str, TensorPlace]:
        """Of every tensor, by Hugging Face name, in files of `folder`."""
        return {
            name: TensorPlace(
                path=folder / file.name, begin=begin, dtype=self.specs[name][0], shape=self.specs[name][1]
            )
            for file in self.files
            for name, begin in file.begins.items()
        }

    def placed(self, places: Mapping[str, TensorPlace]) -> dict[str, Sequence[TensorPlace]]:
        """Places by Hugging Face name as those of the tensors that were given."""
        return {
            name: [replace(places[cut.name], shape=cut.box, start=cut.start) for cut in cuts]
            for name, cuts in self.cuts.items()
        }


def lay_out_export(weights: Specs, model: BaseModel, *, dtype: str, shard_bytes: int = SHARD_BYTES) -> ExportLayout:
    """The folder for `weights`, in `dtype`; "auto" is the base's own. Raises CheckpointError on any disagreement.

    A weight has the trainer's name or its Hugging Face names.
    """
    chosen = model.dtype if dtype == "auto" else dtype
    if chosen not in DTYPES:
        raise CheckpointError(f"cannot export as {dtype!r}: use auto, {', '.join(DTYPES)}")
    cuts = _cuts(weights, model)
    specs = _specs(weights, cuts, DTYPES[chosen])
    shards = _shards(specs, shard_bytes)
    count = len(shards)
    names = [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
    files = tuple(
        _file(name, shard) for name, shard in zip(names if count > 1 else ["model.safetensors"], shards, strict=True)
    )
    texts = {"config.json": model.config_text(chosen)}
    if count > 1:
        total = sum(_size(spec) for spec in specs.values())
        # In the model's order, which is that of the shards.
        held = {name: file.name for file, shard in zip(files, shards, strict=True) for name in shard}
        texts[INDEX] = json.dumps({"metadata": {"total_size": total}, "weight_map": held}, indent=2).encode()
    return ExportLayout(model=model, dtype=chosen, specs=specs, cuts=cuts, files=files, texts=texts)


def _file(name: str, specs: Specs) -> ExportFile:
    slots = lay_out(specs)
    header = pack_header(slots, {"format": "pt"})
    begins = {slot.name: len(header) + slot.begin for slot in slots}
    return ExportFile(name=name, header=header, bytes=len(header) + (slots[-1].end if slots else 0), begins=begins)


def _cuts(weights: Specs, model: BaseModel) -> dict[str, Sequence[Cut]]:
    """What each weight is written as, in the model's order. Raises CheckpointError on any disagreement."""
    cuts: dict[str, Sequence[Cut]] = {}
    missing: list[str] = []
    for name in model.shapes:
        parts = model.naming.cuts(name)
        apart = [cut.name for cut in parts if cut.name in weights and name not in weights]
        cuts |= {name: parts} if not apart else {cut.name: (whole(cut.name, cut.shape),) for cut in parts}
        missing += [one for one in ([cut.name for cut in parts] if apart else [name]) if one not in weights]
    unexpected = sorted(set(weights) - set(cuts) - set(model.tied))
    if missing or unexpected:
        raise CheckpointError(
            f"cannot export: the weights do not fit the model in {model.folder}: {len(missing)} missing "
            f"({', '.join(sorted(missing)[:3]) or 'none'}), {len(unexpected)} unexpected "
            f"({', '.join(unexpected[:3]) or 'none'})"
        )
    shapes = dict(model.shapes) | {cut.name: cut.shape for cut in model.naming.names.values() if cut.name in cuts}
    for name in cuts:
        held, shape = weights[name][1], shapes[name]
        padded = held[:1] > (model.vocab_size,) == shape[:1] and held[1:] == shape[1:]
        if held != shape and not padded:
            raise CheckpointError(
                f"cannot export: {name} has shape {list(held)}, the model in {model.folder} wants {list(shape)}"
            )
    return cuts


def _specs(weights: Specs, cuts: Mapping[str, Sequence[Cut]], dtype: str) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Dtype and shape of each tensor to write, in the model's order."""
    return {
        cut.name: (dtype if weights[name][0] in DTYPES.values() else weights[name][0], cut.shape)
        for name, parts in cuts.items()
        for cut in parts
    }


def _size(spec: tuple[str, tuple[int, ...]]) -> int:
    return ITEM_BYTES[spec[0]] * math.prod(spec[1])


def _shards(specs: Specs, limit: int) -> list[dict[str, tuple[str, tuple[int, ...]]]]:
    """Tensors in order, as many to a shard as stay within `limit` bytes; a larger one has a shard for itself."""
    shards: list[dict[str, tuple[str, tuple[int, ...]]]] = [{}]
    filled = 0
    for name, spec in specs.items():
        if shards[-1] and filled + _size(spec) > limit:
            shards.append({})
            filled = 0
        shards[-1][name] = spec
        filled += _size(spec)
    return shards
