"""What a rule says of settings."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tidemill.config.run import RunConfig

__all__ = ["Finding", "Rule"]


@dataclass(frozen=True)
class Finding:
    """A contradiction. The first of `paths` is where it is reported; the others are what it depends on."""

    paths: tuple[str, ...]
    text: str


Rule = Callable[[RunConfig], Iterator[Finding]]
