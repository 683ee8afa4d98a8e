"""Which files of a model folder are a tokenizer: the one list, for looks at the disk and for loading. No library."""

from pathlib import Path

__all__ = ["TOKENIZER_KINDS", "holds_a_tokenizer", "tokenizer_kinds_in_words"]

TOKENIZER_KINDS = (
    ("tokenizer.json",),
    ("tokenizer.model",),
    ("vocab.json", "merges.txt"),
    ("vocab.txt",),
    ("spiece.model",),
    ("sentencepiece.bpe.model",),
)
"""Each is enough to make a tokenizer; with none, transformers makes an empty one up from config.json."""


def holds_a_tokenizer(folder: Path) -> bool:
    """Whether all files of one kind are there. False too where the folder cannot be looked at."""
    try:
        return any(all((folder / name).is_file() for name in kind) for kind in TOKENIZER_KINDS)
    except OSError:
        return False


def tokenizer_kinds_in_words() -> str:
    """The kinds, for messages."""
    return ", ".join(" with ".join(kind) for kind in TOKENIZER_KINDS)
