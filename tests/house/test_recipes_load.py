"""Every recipe makes a run, given the files that it names."""

from pathlib import Path

import pytest

from tidemill.config.load import load

RECIPES = Path(__file__).parents[2] / "recipes"


@pytest.mark.parametrize("recipe", sorted(RECIPES.rglob("*.toml")), ids=lambda path: path.name)
def test_a_recipe_has_no_problem(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(RECIPES.parent)
    assert load([recipe], [], check_files=False).config.steps > 0
