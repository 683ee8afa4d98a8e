"""The folder that a run started from, as an export needs it: names and shapes that its class expects, and its texts.

The model is built without memory (on torch's meta device) to learn its names, so that an export is compared with what
`from_pretrained` will ask for, whatever the architecture.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from tidemill.checkpoint.safetensors_file import TensorFile
from tidemill.errors import CheckpointError, DataError
from tidemill.names.naming import Naming

__all__ = ["DTYPES", "BaseModel", "read_base_model"]

DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}

_COPIED = (
    "generation_config.json",
    "tokenizer*",
    "vocab.*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "additional_chat_templates",
    "*.jinja",
    "*.tiktoken",
    "*.model",
    "LICENSE*",
    "NOTICE*",
)


@dataclass(frozen=True, kw_only=True)
class BaseModel:
    """`naming` has the names and shapes that a trainer holds, and those that files have.

    `copied` are the files, relative to `folder`, that an export takes over byte for byte.
    """

    folder: Path
    config: Mapping[str, Any]
    dtype: str
    vocab_size: int
    naming: Naming
    copied: tuple[Path, ...]

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """By the trainer's name, in the model's order, tied tensors once."""
        return self.naming.shapes

    @property
    def tied(self) -> Mapping[str, str]:
        """The further names of tied tensors, and the one in `shapes` of each."""
        return self.naming.tied

    def config_text(self, dtype: str) -> bytes:
        """config.json for weights of `dtype`: the base's own bytes when they say so already."""
        text = (self.folder / "config.json").read_bytes()
        key = "torch_dtype" if "torch_dtype" in self.config else "dtype"
        if self.config.get(key) == dtype and "quantization_config" not in self.config:
            return text
        fields = {name: value for name, value in self.config.items() if name != "quantization_config"}
        return (json.dumps(fields | {key: dtype}, indent=2, ensure_ascii=False) + "\n").encode()


def read_base_model(folder: Path) -> BaseModel:
    """Raises CheckpointError when the folder is no model that can be exported to."""
    try:
        config = json.loads((folder / "config.json").read_bytes())
        copied = tuple(_copied(folder))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot export: {folder} is not a readable model folder ({error})") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"cannot export: {folder / 'config.json'} is not a JSON object")
    vocab_size, naming = _expected(folder)
    return BaseModel(
        folder=folder,
        config=config,
        dtype=_dtype(folder, config),
        vocab_size=vocab_size,
        naming=naming,
        copied=copied,
    )


def _copied(folder: Path) -> list[Path]:
    found = [path for path in sorted(folder.iterdir()) if any(fnmatch(path.name, pattern) for pattern in _COPIED)]
    files = [path for path in found if path.is_file()]
    for path in found:
        files += [file for file in sorted(path.rglob("*")) if file.is_file()]
    return [file.relative_to(folder) for file in files]


def _dtype(folder: Path, config: Mapping[str, Any]) -> str:
    named = config.get("dtype") or config.get("torch_dtype")
    if named in DTYPES:
        return str(named)
    for path in sorted(folder.glob("*.safetensors")):
        held = {slot.dtype for slot in TensorFile(path).header.slots}
        for dtype, name in DTYPES.items():
            if name in held:
                return dtype
    return "float32"


def _expected(folder: Path) -> tuple[int, Naming]:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from tidemill.models.naming import model_naming

    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"cannot export: transformers builds no model from {folder} ({error})") from error
    try:
        return int(config.get_text_config().vocab_size), model_naming(model)
    except DataError as error:
        raise CheckpointError(f"cannot export to a model such as that in {folder}: {error}") from error
