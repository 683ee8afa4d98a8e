"""Text that cannot be encoded, made encodable by one stated rule.

JSON can name one half of a surrogate pair (`"\\ud83d"`), which no encoding can write. Each such half becomes U+FFFD,
the replacement character, when it is read: all that follows (tokenizer, rewards, logs, files) sees ordinary text.
"""

import re
from typing import Any

__all__ = ["has_surrogates", "without_surrogates"]

_SURROGATE = re.compile("[\ud800-\udfff]")


def has_surrogates(value: Any) -> bool:
    """Whether any text in a JSON value, keys included, holds half a surrogate pair."""
    if isinstance(value, str):
        return _SURROGATE.search(value) is not None
    if isinstance(value, list):
        return any(map(has_surrogates, value))
    if isinstance(value, dict):
        return any(map(has_surrogates, value.keys())) or any(map(has_surrogates, value.values()))
    return False


def without_surrogates(value: Any) -> Any:
    """The JSON value with U+FFFD for each half of a surrogate pair."""
    if isinstance(value, str):
        return _SURROGATE.sub("\ufffd", value)
    if isinstance(value, list):
        return [without_surrogates(item) for item in value]
    if isinstance(value, dict):
        return {without_surrogates(key): without_surrogates(item) for key, item in value.items()}
    return value
