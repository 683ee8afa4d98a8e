"""Text to token ids and back, from a local folder: nothing is ever fetched, no code of the folder is run.

Each prompt is tokenized once, here. Plain text gets what the tokenizer gives by default, its start token included; a
chat goes through the chat template once and gets what the template writes and nothing else, so that there is never a
second start token. In the safe mode, which is the default, text never becomes a control token (`control_tokens.py`).
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tidemill.data.control_tokens import ControlToken, Marker, pieces
from tidemill.data.text import without_surrogates
from tidemill.data.tokenizer_folder import load_tokenizer, stored_end_ids
from tidemill.errors import DataError

__all__ = ["Message", "Tokenizer"]

Message = Mapping[str, Any]


class Tokenizer:
    """The tokenizer of a model folder.

    `allow_special_tokens` switches the safe mode off: control tokens written in a prompt are then recognised.
    Raises DataError when the folder holds no tokenizer, or one that cannot be loaded without running its own code.
    """

    def __init__(self, folder: Path, *, allow_special_tokens: bool = False) -> None:
        self.folder = Path(folder)
        self._hf = load_tokenizer(self.folder)
        self._with_control = _backend(self._hf)
        self._text_only = _backend(self._hf)
        self._text_only.encode_special_tokens = True
        self._safe = not allow_special_tokens
        self._control = _control_tokens(self._hf)
        self.eos_token_ids: tuple[int, ...] = stored_end_ids(self.folder, self._hf)
        """Every id that ends an answer, in ascending order: those of tokenizer, config and generation config."""

    @property
    def control_token_ids(self) -> frozenset[int]:
        """The ids that text of a prompt must not become; an id that stands for unknown characters only is not one."""
        unknown = {self._hf.unk_token_id} - set(self.eos_token_ids)
        return frozenset(token.id for token in self._control) - unknown

    @property
    def has_chat_template(self) -> bool:
        """Whether chats can be encoded."""
        return bool(self._hf.chat_template)

    def encode_plain(self, text: str) -> tuple[int, ...]:
        """Ids of plain text with the special tokens that the tokenizer adds by default."""
        return self._encode(without_surrogates(text), add_special_tokens=True)

    def encode_completion(self, text: str) -> tuple[int, ...]:
        """Ids of an answer that follows a prompt, end-of-sequence id included. Raises DataError without such an id."""
        if not self.eos_token_ids:
            raise DataError(
                f"cannot end a demonstration: {self.folder} names no end-of-sequence token; "
                "set eos_token in tokenizer_config.json or eos_token_id in generation_config.json"
            )
        own = self._hf.eos_token_id
        eos = int(own) if own is not None else self.eos_token_ids[0]
        return (*self._encode(without_surrogates(text), add_special_tokens=False), eos)

    def read_chat(self, messages: Sequence[Message]) -> tuple[str, tuple[int, ...]]:
        """A chat that the model is to continue, as the template renders it with the opening of the answer, and its ids.

        Raises DataError when there is no chat template, or it refuses these messages.
        """
        clean: list[dict[str, Any]] = without_surrogates([dict(message) for message in messages])
        if not self._safe:
            text = self._render(clean)
            return text, tuple(self._with_control.encode(text, add_special_tokens=False).ids)
        marker = Marker(self._control, [json.dumps(clean, ensure_ascii=False), str(self._hf.chat_template)])
        rendered = self._render([_marked(message, marker) for message in clean])
        text = marker.remove(rendered)
        if not marker.marked:
            return text, tuple(self._with_control.encode(text, add_special_tokens=False).ids)
        return text, self._encode_pieces(rendered, marker.mark)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Text of ids; for people and rewards, never to be encoded again."""
        text = self._hf.decode(
            list(token_ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        return str(text)

    def _encode(self, text: str, *, add_special_tokens: bool) -> tuple[int, ...]:
        if not self._safe:
            return tuple(self._with_control.encode(text, add_special_tokens=add_special_tokens).ids)
        ids = tuple(self._text_only.encode(text, add_special_tokens=False).ids)
        self._check_no_control(ids, text)
        if not add_special_tokens:
            return ids
        return tuple(self._text_only.encode(text, add_special_tokens=True).ids)

    def _encode_pieces(self, rendered: str, mark: str) -> tuple[int, ...]:
        ids: list[int] = []
        for piece in pieces(rendered, self._control, mark):
            ids.extend([piece.id] if isinstance(piece, ControlToken) else self._encode(piece, add_special_tokens=False))
        return tuple(ids)

    def _check_no_control(self, ids: tuple[int, ...], text: str) -> None:
        """Some vocabularies hold a control token's text as an ordinary word, which no setting splits."""
        found = self.control_token_ids.intersection(ids)
        if found:
            raise DataError(
                f"cannot encode {text[:60]!r} as plain text: this tokenizer has no other ids for "
                f"{self.decode(sorted(found))!r}; change the text, or set data.allow_special_tokens = true"
            )

    def _render(self, messages: list[dict[str, Any]]) -> str:
        import jinja2

        if not self.has_chat_template:
            raise DataError(
                f"cannot encode a chat: {self.folder} has no chat template; add chat_template.jinja to that folder, "
                'use an instruction-tuned model, or write prompts as plain text and set data.chat = "plain"'
            )
        try:
            return str(self._hf.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
            raise DataError(f"the chat template refuses these messages: {error}") from error


def _marked(message: dict[str, Any], marker: Marker) -> dict[str, Any]:
    """Everything but the role is marked: a template builds control tokens out of roles (`<|user|>`)."""
    return {key: value if key == "role" else marker.apply(value) for key, value in message.items()}


def _backend(hf: Any) -> Any:
    """A copy of our own, which cuts and pads nothing."""
    from tokenizers import Tokenizer as Backend

    backend = Backend.from_str(hf.backend_tokenizer.to_str())
    backend.no_truncation()
    backend.no_padding()
    return backend


def _control_tokens(hf: Any) -> tuple[ControlToken, ...]:
    named = set(hf.all_special_ids)
    return tuple(
        ControlToken(id=id, content=token.content, strips_left=token.lstrip, strips_right=token.rstrip)
        for id, token in sorted(hf.added_tokens_decoder.items())
        if token.special or id in named
    )
