"""Walking through settings classes: which settings there are, for a tree of values that says what each `use` is."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

from tidemill.config.base import Settings
from tidemill.config.kinds import Label
from tidemill.config.registry import SEAMS, Plugged, Seam, resolve

__all__ = ["Leaf", "field_at", "is_text", "leaves", "seam_of", "section_class", "sections"]


@dataclass(frozen=True, kw_only=True)
class Leaf:
    """One setting: its path, its field, and the class that has it."""

    path: tuple[str, ...]
    field: FieldInfo
    owner: type[Settings]


def seam_of(field: FieldInfo) -> Seam | None:
    """The seam that a field is, if it is one."""
    return next((SEAMS[mark.seam] for mark in field.metadata if isinstance(mark, Plugged)), None)


def section_class(field: FieldInfo, table: Any) -> type[Settings] | None:
    """The class of a section, which its `use` may decide; None when the field is a single setting.

    A `use` that cannot be resolved gives the class that all plug-ins of the seam share.
    """
    seam = seam_of(field)
    if seam is None:
        annotation = field.annotation
        return annotation if isinstance(annotation, type) and issubclass(annotation, Settings) else None
    use = table.get("use", seam.default) if isinstance(table, Mapping) else seam.default
    try:
        return resolve(seam, use) if isinstance(use, str) else seam.parent
    except PydanticCustomError:
        return seam.parent


def _inside(tree: Any, name: str) -> Any:
    return tree.get(name, {}) if isinstance(tree, Mapping) else {}


def leaves(settings: type[Settings], tree: Any, prefix: tuple[str, ...] = ()) -> Iterator[Leaf]:
    """Every setting, in the order of the classes."""
    for name, field in settings.model_fields.items():
        section = section_class(field, _inside(tree, name))
        if section is None:
            yield Leaf(path=(*prefix, name), field=field, owner=settings)
        else:
            yield from leaves(section, _inside(tree, name), (*prefix, name))


def sections(settings: type[Settings], tree: Any, prefix: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The path of every section, outer ones first."""
    for name, field in settings.model_fields.items():
        section = section_class(field, _inside(tree, name))
        if section is not None:
            yield (*prefix, name)
            yield from sections(section, _inside(tree, name), (*prefix, name))


def field_at(settings: type[Settings], tree: Any, path: tuple[str, ...]) -> FieldInfo | None:
    """The field at `path`, section or setting; None when there is no such thing."""
    section: type[Settings] | None = settings
    field = None
    for name in path:
        if section is None or name not in section.model_fields:
            return None
        field = section.model_fields[name]
        tree = _inside(tree, name)
        section = section_class(field, tree)
    return field


def is_text(field: FieldInfo) -> bool:
    """Whether a word of the command line that is a number, say, is this setting's text as it stands."""
    if any(isinstance(mark, Label) and mark.text for mark in field.metadata):
        return True
    if get_origin(field.annotation) is Literal:
        return all(isinstance(choice, str) for choice in get_args(field.annotation))
    return field.annotation is str
