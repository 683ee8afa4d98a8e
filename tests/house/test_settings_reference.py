"""Every setting is documented, and the page that says so is up to date."""

from pathlib import Path

import pytest

from tidemill.config.base import Settings
from tidemill.config.explain import reference
from tidemill.config.fields import section_class
from tidemill.config.registry import SEAMS
from tidemill.config.run import RunConfig

PAGE = Path(__file__).parents[2] / "docs" / "settings.md"


def _classes() -> list[type[Settings]]:
    found: list[type[Settings]] = []
    waiting: list[type[Settings]] = [RunConfig]
    for seam in SEAMS.values():
        waiting += [seam.parent, *seam.builtin.values(), *([seam.function] if seam.function else [])]
    while waiting:
        settings = waiting.pop()
        if settings in found:
            continue
        found.append(settings)
        inner = (section_class(field, {}) for field in settings.model_fields.values())
        waiting += [each for each in inner if each is not None]
    return found


@pytest.mark.parametrize("settings", _classes(), ids=lambda settings: settings.__name__)
def test_every_setting_has_its_help_under_it(settings: type[Settings]) -> None:
    assert settings.__doc__
    for name, field in settings.model_fields.items():
        assert field.description, f"{settings.__name__}.{name} has no docstring"
        assert field.description.rstrip().endswith((".", "`.")), (
            f"{settings.__name__}.{name}: a sentence ends with a dot"
        )
        assert not field.is_required() or field.examples or name in ("run", "data", "use", "pattern"), name


def test_the_page_of_settings_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == reference(), (
        "docs/settings.md is stale; run: python -m tidemill.config.explain > docs/settings.md"
    )
