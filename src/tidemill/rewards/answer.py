"""What a reward function is given: answers that are their own text, with what belongs to them as attributes.

Nothing here may import more than the standard library: it is loaded in every reward process.
"""

from collections.abc import Mapping
from typing import Any

__all__ = ["Answer"]


class Answer(str):
    """One answer. It is its text; attributes tell where it comes from. Read-only.

    `prompt` is the text that was sent (chat template included), `prompt_id` the row, `label` and `extra` its columns.
    """

    id: str
    prompt: str
    prompt_id: str
    sample: int
    label: Any
    extra: Mapping[str, Any]
    token_ids: tuple[int, ...]
    stop_reason: str

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> "Answer":
        """An answer from JSON values."""
        answer = cls(fields["text"])
        columns = {name: value for name, value in fields.items() if name != "text"}
        vars(answer).update({**columns, "token_ids": tuple(fields["token_ids"])})
        return answer

    @property
    def text(self) -> str:
        """The answer without the tokens that ended it."""
        return str.__str__(self)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"an answer cannot be changed: {name} = {value!r}")
