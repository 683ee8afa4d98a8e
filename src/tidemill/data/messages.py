"""The messages of a chat, checked and in one form: `role` a word, `content` one text.

Content in parts of text is joined; `null` content (a call of a tool) becomes empty text, since templates would print
`None`. Other fields (`tool_calls`, `name`) pass through to the template. A last message of the assistant is a turn
like any other: a new answer is asked for after it.
"""

import re
from typing import Any

__all__ = ["as_messages"]

# Templates build control tokens out of roles, so a role must not be able to hold one.
_ROLE = re.compile(r"[A-Za-z][A-Za-z0-9_.\-]*")


def as_messages(value: list[Any]) -> list[dict[str, Any]]:
    """The list as messages. Raises ValueError, naming the message from 1, where it is not."""
    if not value:
        raise ValueError("prompt is an empty list; it needs at least one message")
    return [_message(number, message) for number, message in enumerate(value, start=1)]


def _message(number: int, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"message {number} must be an object with role and content")
    role = value.get("role")
    if not isinstance(role, str) or not _ROLE.fullmatch(role):
        raise ValueError(f"message {number} needs a role such as 'user'")
    if "content" not in value and "tool_calls" not in value:
        raise ValueError(f"message {number} has no content")
    return {**value, "content": _content(number, value.get("content"), bool(value.get("tool_calls")))}


def _content(number: int, value: Any, calls_tools: bool) -> str:
    if isinstance(value, str):
        return value
    if value is None and calls_tools:
        return ""
    if isinstance(value, list) and value and all(map(_is_text_part, value)):
        return "".join(part["text"] for part in value)
    raise ValueError(f"content of message {number} must be text, or a list of parts of type 'text'")


def _is_text_part(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
