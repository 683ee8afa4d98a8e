"""What a label accepts as the right answer, as text. Standard library only: reward processes load it."""

import json
from typing import Any

__all__ = ["accepted"]


def accepted(label: Any) -> tuple[str, ...]:
    """Texts that equal the label: itself; each entry of a list; other JSON values as JSON writes them. None of null."""
    if label is None:
        return ()
    if isinstance(label, str):
        return (label,)
    if isinstance(label, list):
        return tuple(text for entry in label for text in accepted(entry))
    return (json.dumps(label, ensure_ascii=False),)
