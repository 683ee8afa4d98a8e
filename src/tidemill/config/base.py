"""What every settings class shares: frozen, closed, strict, and documented by the text under each field.

`Settings` is a section. `Plug` is a section whose `use` picks an implementation, which the class names as text
(`"package.module:Name"`), so that describing a run imports nothing heavy.
"""

from typing import Annotated, Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, Field

__all__ = ["Plug", "Settings"]


class Settings(BaseModel):
    """A closed set of settings. Equal settings mean the same thing; there is no hidden state.

    Strict: `true` is no number, `"5"` is no integer, `1.5` is not cut to 1. NaN and infinity are refused.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        validate_default=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        protected_namespaces=(),
    )

    def to_json(self) -> dict[str, Any]:
        """JSON values; `from_json` gives the equal settings back."""
        return self.model_dump(mode="json")

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        """Inverse of `to_json`. Raises pydantic.ValidationError on anything that does not fit."""
        return cls.model_validate(data)


class Plug(Settings):
    """Settings that name their implementation. A plug-in subclasses the Plug of its seam, not this class."""

    implementation: ClassVar[str] = ""
    requires: ClassVar[tuple[str, ...]] = ()
    """Libraries outside Tidemill's own dependencies, by the names that they are imported by."""
    extra: ClassVar[str] = ""
    """The extra of Tidemill that installs them; empty when another package brings the plug-in."""

    use: Annotated[str, Field(min_length=1)]
    """Which implementation: a built-in name, an entry point, or `module:Class` of a settings class."""
