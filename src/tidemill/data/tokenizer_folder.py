"""The tokenizer of a model folder and the ids that end its answers: loaded one way, for prompts and for the engine.

Local files only; no code of the folder is run.
"""

import json
from pathlib import Path
from typing import Any

from tidemill.config.tokenizer_files import holds_a_tokenizer, tokenizer_kinds_in_words
from tidemill.errors import DataError

__all__ = ["load_tokenizer", "stored_end_ids"]


def load_tokenizer(folder: Path) -> Any:
    """transformers' tokenizer of the folder, a fast one. Raises DataError when there is none, or it cannot be read."""
    if not folder.is_dir():
        raise DataError(f"cannot load a tokenizer: {folder} is not a folder; set model to a local model folder")
    # With no file to read, transformers makes up an empty tokenizer from config.json and says nothing.
    if not holds_a_tokenizer(folder):
        raise DataError(
            f"cannot load a tokenizer: {folder} holds none of {tokenizer_kinds_in_words()}; "
            "copy the model's tokenizer files into it"
        )
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # a damaged file raises whatever its parser raises, up to the bare Exception of Rust
        raise DataError(f"cannot load the tokenizer in {folder}: {error}; restore its files") from error
    if not tokenizer.is_fast:
        raise DataError(f"cannot use the tokenizer in {folder}: it has no fast form; save it with tokenizer.json")
    return tokenizer


def stored_end_ids(folder: Path, tokenizer: Any) -> tuple[int, ...]:
    """Every id that ends a sequence according to config.json, generation_config.json or the tokenizer, ascending.

    Models that end a turn with another id than the tokenizer's are common: each place may know one that others do not.
    Raises DataError for a file that cannot be read and for what is no id.
    """
    found: set[int] = set() if tokenizer.eos_token_id is None else {int(tokenizer.eos_token_id)}
    for name in ("config.json", "generation_config.json"):
        found.update(_ids_in(folder / name))
    return tuple(sorted(found))


def _ids_in(path: Path) -> list[int]:
    if not path.is_file():
        return []
    try:
        value = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
    except (OSError, ValueError, AttributeError) as error:
        raise DataError(f"cannot read {path}: {error}; copy it again from where the model came from") from error
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(token, int) and not isinstance(token, bool) and token >= 0 for token in ids):
        raise DataError(f"cannot use {path}: eos_token_id is {value!r}; it should be an id or a list of ids")
    return ids
