"""Text of unknown origin made safe to show: prompts, answers, labels and messages of other people's code.

Control characters could move a terminal's cursor or hide text; bidirectional marks could turn a line around; lone
surrogates cannot be written as UTF-8. All of them become visible escapes. Tabs and line ends stay where they may.
"""

import re

__all__ = ["cut", "one_line", "visible"]

_UNSAFE = (
    "\x00-\x08\x0b-\x1f\x7f-\x9f"  # C0 and C1 without tab and line feed
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # marks, embeddings, overrides and isolates of direction
    "\u2028\u2029\ufff9-\ufffb\ufeff"
    "\ud800-\udfff\ufffe\uffff"
)
_UNSAFE_ANYWHERE = re.compile(f"[{_UNSAFE}]")
_UNSAFE_IN_A_LINE = re.compile(f"[{_UNSAFE}\t\n]")


def visible(text: str) -> str:
    r"""The text with every unsafe character as `\x1b` or `\u202e`; tabs and line feeds stay, `\r\n` becomes `\n`."""
    return _UNSAFE_ANYWHERE.sub(_escape, text.replace("\r\n", "\n"))


def one_line(text: str) -> str:
    """As `visible`, on one line."""
    return _UNSAFE_IN_A_LINE.sub(_escape, text)


def cut(text: str, limit: int) -> str:
    """At most about `limit` characters: what is left out is taken from the middle, for answers end with the answer."""
    if len(text) <= limit:
        return text
    tail = limit // 4
    return f"{text[: limit - tail]} [... {len(text) - limit} characters left out ...] {text[len(text) - tail :]}"


def _escape(match: re.Match[str]) -> str:
    code = ord(match[0])
    known = {"\n": "\\n", "\t": "\\t", "\r": "\\r"}
    return known.get(match[0]) or (f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}")
