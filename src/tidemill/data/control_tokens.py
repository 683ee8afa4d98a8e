"""Keeps the text of prompts from turning into control tokens, through any chat template.

Control tokens are those that the tokenizer declares special (`<|im_end|>`, `<s>`): in a prompt they end turns and forge
others. A template writes them on purpose and a message may hold the same characters as text; once rendered, the two
look alike. So the texts of the messages are marked before rendering: behind the first character of every occurrence
of a control token goes one private-use character that occurs nowhere else. Trimming, joining and conditions of a
template work as before, since nothing is added at the ends of a text. In what was rendered, unbroken control tokens
are the template's; the stretches between them are encoded, mark removed, by a tokenizer that recognises none.

Not covered: characters that become a control token only together with those that the template writes beside them.
Added tokens that the tokenizer does not call special (`<think>`, `<tool_call>` of some models) are ordinary text.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

__all__ = ["ControlToken", "Marker", "pieces"]

_PRIVATE_USE = range(0xF0000, 0xFFFFE)


@dataclass(frozen=True, kw_only=True)
class ControlToken:
    """A token that text must not become. The `strips_*` ones swallow the white space beside them."""

    id: int
    content: str
    strips_left: bool = False
    strips_right: bool = False


@dataclass(frozen=True, kw_only=True)
class _Finder:
    """Where control tokens begin in a text, overlapping ones too."""

    pattern: re.Pattern[str]

    @classmethod
    def of(cls, tokens: Iterable[ControlToken]) -> "_Finder":
        words = sorted((token.content for token in tokens), key=len, reverse=True)
        return cls(pattern=re.compile(f"(?=({'|'.join(map(re.escape, words))}))" if words else "(?!)"))


class Marker:
    """Marks control tokens in the texts of one chat; `mark` is the character that it uses.

    `texts` is every text that takes part in the rendering: the mark is a character that none of them holds.
    """

    def __init__(self, tokens: Iterable[ControlToken], texts: Iterable[str]) -> None:
        self._finder = _Finder.of(tokens)
        used = set().union(*map(set, texts))
        self.mark = next(chr(code) for code in _PRIVATE_USE if chr(code) not in used)
        self.marked = 0

    def apply(self, value: Any) -> Any:
        """The JSON value with its texts marked; counts occurrences in `marked`. Keys are left alone."""
        if isinstance(value, str):
            return self._mark(value)
        if isinstance(value, list):
            return [self.apply(item) for item in value]
        if isinstance(value, dict):
            return {key: self.apply(item) for key, item in value.items()}
        return value

    def _mark(self, text: str) -> str:
        starts = [match.start() for match in self._finder.pattern.finditer(text)]
        self.marked += len(starts)
        for start in reversed(starts):
            text = text[: start + 1] + self.mark + text[start + 1 :]
        return text

    def remove(self, text: str) -> str:
        """The text without marks."""
        return text.replace(self.mark, "")


def pieces(rendered: str, tokens: Iterable[ControlToken], mark: str) -> Iterator[str | ControlToken]:
    """The rendered chat as stretches of ordinary text, marks removed, and the control tokens of the template."""
    by_content = {token.content: token for token in tokens}
    words = "|".join(re.escape(content) for content in sorted(by_content, key=len, reverse=True))
    # The look-ahead matters for control tokens of one character: nothing inside can be marked, so the mark follows.
    pattern = re.compile(f"({words})(?!{mark})")
    position, strip_left = 0, False
    for match in pattern.finditer(rendered):
        token = by_content[match[0]]
        text = rendered[position : match.start()].replace(mark, "")
        text = text.lstrip() if strip_left else text
        text = text.rstrip() if token.strips_left else text
        if text:
            yield text
        yield token
        position, strip_left = match.end(), token.strips_right
    rest = rendered[position:].replace(mark, "")
    rest = rest.lstrip() if strip_left else rest
    if rest:
        yield rest
