"""What a checkpoint belongs to: hashes of base model, tokenizer and data, so that a run resumes only what it began."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

import xxhash

from tidemill.config.run import RunConfig
from tidemill.config.tokenizer_files import TOKENIZER_KINDS
from tidemill.data.fingerprint import fingerprint

__all__ = ["model_identity", "run_identity", "tokenizer_identity"]

_SAMPLE = 1 << 20
_TOKENIZER_FILES = (
    *(name for kind in TOKENIZER_KINDS for name in kind),
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
)


def run_identity(config: RunConfig) -> Mapping[str, str]:
    """What a checkpoint of this run is bound to, by the names that `checkpoint.accept` takes."""
    found = {
        "model": model_identity(config.model),
        "tokenizer": tokenizer_identity(config.model),
        "data": fingerprint(config.data.prompts),
        "algorithm": config.algorithm.use,
        "warm_up": "none",
        "seed": str(config.run.seed),
    }
    if config.warm_up.data is not None and config.warm_up.steps:
        found["warm_up"] = f"{config.warm_up.steps} steps of {fingerprint(config.warm_up.data)}"
    return found


def model_identity(folder: Path) -> str:
    """Hash of the model's configuration and weights: of each file its size, and a MiB from start, middle and end.

    It tells models apart in milliseconds whatever their size; it is no integrity check.
    """
    digest = xxhash.xxh3_128()
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    digest.update(json.dumps(config, sort_keys=True).encode())
    for path in sorted(folder.glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            for start in (0, size // 2, max(size - _SAMPLE, 0)):
                file.seek(start)
                digest.update(file.read(_SAMPLE))
    return digest.hexdigest()


def tokenizer_identity(folder: Path) -> str:
    """Hash of the tokenizer's files and chat template."""
    return _files(folder / name for name in _TOKENIZER_FILES)


def _files(paths: Iterable[Path]) -> str:
    digest = xxhash.xxh3_128()
    for path in paths:
        if path.is_file():
            digest.update(path.name.encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()
