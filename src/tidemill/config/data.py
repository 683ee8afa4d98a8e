"""Where prompts come from, and how they become tokens."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from tidemill.config.base import Plug
from tidemill.config.kinds import AbsolutePath, Count

__all__ = ["DataSettings", "JsonlDataSettings"]


class DataSettings(Plug):
    """What every source of prompts has."""

    use: Annotated[str, Field(min_length=1)] = "jsonl"
    """Which source: `jsonl`, an entry point in `tidemill.data`, or `module:Class` of a settings class."""
    prompts: Annotated[AbsolutePath, Field(examples=["data/prompts.jsonl"])]
    """File of prompts, one JSON object a line."""
    shuffle: bool = True
    """Take the prompts of each epoch in a random order, which `run.seed` determines."""
    max_prompt_tokens: Count = 1024
    """Prompts longer than this, measured as sent, are left out and counted."""
    skip_bad_lines: bool = False
    """Leave out lines that cannot be read, and count them; false refuses the file and names them."""
    chat: Literal["auto", "plain", "template"] = "auto"
    """Whether the model's chat template wraps a prompt: `auto` for chats only, `plain` never, `template` always."""
    allow_special_tokens: bool = False
    """Let text in a prompt become control tokens of the model; false reads it as plain text."""


class JsonlDataSettings(DataSettings):
    """A JSON Lines file."""

    implementation: ClassVar[str] = "tidemill.data.jsonl:JsonlData"
