"""A GGUF file or a Hugging Face folder, brought into a checked local model folder.

Promises: the folder appears whole or not at all, under its final name, after the model in it was loaded anew and gave
finite logits; it holds safetensors, config, generation config, tokenizer and chat template. No pickle is read and no
code from the source is run. A folder's tokenizer and generation config are copied as they are.
"""

import importlib.util
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.utils import logging

from tidemill.config.tokenizer_files import holds_a_tokenizer
from tidemill.data.tokenizer_folder import load_tokenizer
from tidemill.errors import DataError, PluginError

__all__ = ["ImportedModel", "import_model"]

_COPIED = (
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*",
    "merges.txt",
    "chat_template*",
    "LICENSE*",
)
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class ImportedModel:
    """What was written. `notices` are sentences that a person should read."""

    folder: Path
    architecture: str
    parameters: int
    dtype: str
    tied: bool
    vocabulary: int
    chat_template: bool
    bytes: int
    notices: tuple[str, ...]


def import_model(source: Path, out: Path, *, dtype: Literal["auto", "float32", "bfloat16"] = "auto") -> ImportedModel:
    """Write `out` from `source`. `auto` keeps a folder's dtype and makes bfloat16 of a GGUF's packed weights.

    Raises DataError when the source cannot be used or `out` exists, PluginError when reading GGUF needs a library.
    """
    logging.disable_progress_bar()
    _check_target(source, out)
    gguf = _is_gguf(source)
    partial = out.with_name(f".{out.name}.partial-{os.getpid()}")
    try:
        if gguf:
            notices = _write_gguf(source, partial, "bfloat16" if dtype == "auto" else dtype)
        else:
            notices = _write_folder(source, partial, dtype)
        checked = _checked(partial, out, notices, source)
        _make_durable(partial)
        partial.rename(out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return checked


def _check_target(source: Path, out: Path) -> None:
    if not source.exists():
        raise DataError(f"cannot import {source}: there is nothing there; name a GGUF file or a Hugging Face folder")
    if out.exists():
        raise DataError(f"cannot import into {out}: it exists already; remove it or choose another --out")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"cannot import into {out}: {error}; choose another --out") from error


def _is_gguf(source: Path) -> bool:
    if source.is_dir():
        _check_folder(source)
        return False
    with source.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise DataError(f"cannot import {source}: it is no GGUF file; name a GGUF file or a Hugging Face folder")
    missing = [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        raise PluginError(f"cannot read {source}: {', '.join(missing)} is not installed; pip install 'tidemill[gguf]'")
    return True


def _check_folder(source: Path) -> None:
    if not (source / "config.json").is_file():
        packed = sorted(source.glob("*.gguf"))
        hint = f"name the file {packed[0]} itself" if packed else "name a GGUF file or a Hugging Face folder"
        raise DataError(f"cannot import {source}: there is no config.json in it; {hint}")
    if not holds_a_tokenizer(source):
        raise DataError(f"cannot import {source}: there is no tokenizer in it; copy the tokenizer's files into it")
    if any(source.glob("*.safetensors")):
        return
    pickles = sorted([*source.glob("*.bin"), *source.glob("*.pt"), *source.glob("*.pth")])
    if pickles:
        raise DataError(
            f"cannot import {source}: its weights are a pickle ({pickles[0].name}), which can run code when it is "
            f"read; get the model as safetensors, or convert it where you trust it, with save_pretrained"
        )
    raise DataError(f"cannot import {source}: there is no safetensors file in it; copy the weights into it")


@contextmanager
def _readable(source: Path) -> Iterator[None]:
    """Whatever transformers raises about a source becomes a DataError: it raises anything on damaged files."""
    try:
        yield
    except (DataError, MemoryError):
        raise
    except Exception as error:
        raise DataError(
            f"cannot import {source}: transformers {transformers.__version__} cannot read it: "
            f"{type(error).__name__}: {error}; check that the copy is complete and that it knows this architecture"
        ) from error


def _write_gguf(source: Path, partial: Path, dtype: str) -> tuple[str, ...]:
    with _readable(source):
        where: dict[str, Any] = {
            "pretrained_model_name_or_path": source.parent,
            "gguf_file": source.name,
            "local_files_only": True,
        }
        tokenizer = AutoTokenizer.from_pretrained(**where)
        model, info = AutoModelForCausalLM.from_pretrained(
            **where, **_dequantized(), dtype=_DTYPES[dtype], output_loading_info=True
        )
        _check_loaded(source, info)
        # The model calls itself quantized, and then refuses to be saved, though its weights are plain by now.
        if "quantization_config" in vars(model.config):
            del model.config.quantization_config
        with torch.device("meta"):
            plain = type(model)(model.config)
        plain.load_state_dict(model.state_dict(), assign=True)
        plain.tie_weights()
        plain.save_pretrained(partial)
        _name_special_tokens(tokenizer, plain.config)
        tokenizer.save_pretrained(partial)
    return ()


def _name_special_tokens(tokenizer: Any, config: Any) -> None:
    """Let the tokenizer name the special tokens that the file's metadata names by id.

    transformers 5.17 makes the start token the end token of every GGUF tokenizer; config has the ids right.
    """
    ids = {
        "bos_token": config.bos_token_id,
        "eos_token": config.eos_token_id,
        "pad_token": config.pad_token_id,
    }
    for kind, token in ids.items():
        if isinstance(token, int):
            setattr(tokenizer, kind, tokenizer.convert_ids_to_tokens(token))


def _dequantized() -> dict[str, Any]:
    # Newer transformers keep GGUF weights packed unless told otherwise; older ones always unpack and know no such word.
    if "GgufConfig" not in dir(transformers):
        return {}
    return {"quantization_config": transformers.GgufConfig(dequantize=True)}


def _write_folder(source: Path, partial: Path, dtype: str) -> tuple[str, ...]:
    with _readable(source):
        model, info = AutoModelForCausalLM.from_pretrained(
            source,
            dtype="auto" if dtype == "auto" else _DTYPES[dtype],
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
        )
        _check_loaded(source, info)
        # Written from the config alone, since a contradictory one would refuse to be saved; the source's is copied.
        model.generation_config = GenerationConfig.from_model_config(model.config)
        model.save_pretrained(partial)
    for pattern in _COPIED:
        for file in sorted(source.glob(pattern)):
            if file.is_file():
                shutil.copyfile(file, partial / file.name)
    unexpected = sorted(info["unexpected_keys"])
    if unexpected:
        return (f"{len(unexpected)} tensors of {source} belong to no part of the model: {', '.join(unexpected[:3])}",)
    return ()


def _check_loaded(source: Path, info: dict[str, Any]) -> None:
    """transformers fills what a file lacks with random numbers and goes on."""
    for what in ("missing_keys", "mismatched_keys"):
        names = sorted(str(name) for name in info[what])
        if names:
            raise DataError(
                f"cannot import {source}: {len(names)} weights are {what.split('_')[0]}, among them "
                f"{', '.join(names[:3])}; copy the model again"
            )


def _checked(partial: Path, out: Path, notices: tuple[str, ...], source: Path) -> ImportedModel:
    """Load what was written as anybody would. Raises DataError when something is wrong with it."""
    with _readable(source):
        tokenizer = load_tokenizer(partial)
        model = AutoModelForCausalLM.from_pretrained(partial, dtype="auto", local_files_only=True)
    ids = tokenizer("1 + 1 = 2")["input_ids"]
    vocabulary = model.config.vocab_size
    if not ids or max(ids) >= vocabulary:
        raise DataError(f"cannot import {source}: its tokenizer gives ids {ids}, its model knows {vocabulary}")
    with torch.inference_mode():
        logits = model(torch.tensor([ids])).logits
    if not bool(torch.isfinite(logits).all()):
        raise DataError(f"cannot import {source}: its logits are not finite; the weights are damaged or overflow")
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    if tied != bool(model.config.tie_word_embeddings):
        raise DataError(f"cannot import {source}: its config says tied = {not tied}, but loaded it is {tied}")
    template = tokenizer.chat_template is not None
    if not template:
        notices += ("it has no chat template: prompts must be plain text",)
    return ImportedModel(
        folder=out,
        architecture=type(model).__name__,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        dtype=str(model.dtype).removeprefix("torch."),
        tied=tied,
        vocabulary=vocabulary,
        chat_template=template,
        bytes=sum(file.stat().st_size for file in partial.iterdir()),
        notices=notices,
    )


def _make_durable(folder: Path) -> None:
    """A rename that survives a power cut must not name files that did not."""
    for path in [*folder.iterdir(), folder]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
