"""Weights in a format of pickles, made into a safetensors model folder that a run can start from.

Names and shapes are those of a base model, or nothing is written. Written as an export is: whole, or not at all.
"""

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from tidemill.checkpoint.base_model import read_base_model
from tidemill.checkpoint.export import export_model
from tidemill.checkpoint.foreign.names import matched, unwrapped
from tidemill.checkpoint.foreign.sources import Source, open_bins, open_dcp
from tidemill.config.tokenizer_files import holds_a_tokenizer
from tidemill.contracts.events import Emit
from tidemill.errors import CheckpointError, CheckpointRefused, ConfigError
from tidemill.names.naming import Naming

__all__ = ["Converted", "convert"]

_SHOWN = 3


@dataclass(frozen=True, kw_only=True)
class Converted:
    """What was written. `prefix` stood before the model's names; `notices` are sentences for a person."""

    folder: Path
    prefix: str
    tensors: int
    notices: tuple[str, ...]


def convert(
    *, kind: str, source: Path, base: Path | None, target: Path, dtype: str, prefix: str | None, emit: Emit
) -> Converted:
    """Write the new folder `target`. `kind` is `dcp` or `hf`, which may be its own `base`.

    Raises ConfigError when folders are not what they are called, CheckpointError when the weights cannot be trusted or
    do not fit; then there is no `target`.
    """
    model_folder = _base(kind, source, base)
    opened: Source = open_dcp(source) if kind == "dcp" else open_bins(source)
    try:
        model = read_base_model(model_folder)
        found, names = matched(opened.shapes, _wanted(opened.shapes, model.naming), model.tied, prefix)
        held = opened.tensors(list(names.values()))
        weights = {name: held[there] for name, there in names.items()}
        export_model(weights=weights, base=model_folder, target=target, dtype=dtype, emit=emit)
    except CheckpointRefused as error:
        raise CheckpointRefused(f"cannot convert {source}: {_reason(error)}") from None
    except CheckpointError as error:
        raise CheckpointError(f"cannot convert {source}: {_reason(error)}") from None
    left = sorted(set(opened.shapes) - set(names.values()))
    return Converted(folder=target, prefix=found, tensors=len(names), notices=tuple(_notices(left, target)))


def _wanted(names: Collection[str], naming: Naming) -> list[str]:
    """What to look for among `names`: tensors as files have them apart, if one is there, or as memory joins them."""
    apart = {cut.name for cut in naming.names.values()} - naming.shapes.keys()
    return list(naming.names) if any(unwrapped(name).endswith(tuple(apart)) for name in names) else list(naming.shapes)


def _base(kind: str, source: Path, base: Path | None) -> Path:
    if not source.is_dir():
        raise ConfigError(f"cannot convert {source}: it is no folder that is there")
    if kind == "dcp" and base is None:
        raise ConfigError(
            f"cannot convert {source}: it has no config and no tokenizer; name the model folder that the run started "
            "from with --base"
        )
    folder = source if base is None else base
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"cannot convert {source}: there is no config.json in {folder}; name a model folder as --base"
        )
    if kind == "hf" and any(source.glob("*.safetensors")):
        raise ConfigError(f"cannot convert {source}: it holds safetensors already; use `tidemill model import` on it")
    return folder


def _reason(error: CheckpointError) -> str:
    return str(error).removeprefix("cannot export: ").removeprefix("cannot convert: ")


def _notices(left: list[str], target: Path) -> list[str]:
    notices = []
    if left:
        notices.append(f"{len(left)} tensors belong to no part of the model: {', '.join(left[:_SHOWN])}")
    if not holds_a_tokenizer(target):
        notices.append("there is no tokenizer in the base: copy one into the folder before a run starts from it")
    return notices
