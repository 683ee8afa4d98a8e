"""Settings that changed between two starts (`tidemill.checkpoint.changes`)."""

from dataclasses import replace

from tidemill.checkpoint.changes import changed_settings, changes_since
from tidemill.checkpoint.manifest import Manifest, library_versions


def test_each_changed_setting_is_named_with_both_values() -> None:
    saved = {"steps": 4, "trainer": {"optimizer": {"lr": 1e-4, "betas": [0.9, 0.95]}}, "old": 1}
    now = {"steps": 8, "trainer": {"optimizer": {"lr": 5e-5, "betas": [0.9, 0.95]}}, "new": {"x": True}}
    assert changed_settings(saved, now) == [
        "new.x: not set -> True",
        "old: 1 -> not set",
        "steps: 4 -> 8",
        "trainer.optimizer.lr: 0.0001 -> 5e-05",
    ]


def test_a_start_under_other_settings_and_libraries_is_told_of_both_and_one_like_the_last_of_nothing() -> None:
    here = library_versions()
    saved = Manifest(
        step=1, attempt=1, parts=(), files=(), identity={}, settings={"settings": {"steps": 3}}, retention={},
        versions={**here, "torch": "0.0.1"}, time=0.0,
    )  # fmt: skip
    settings, libraries = changes_since(saved, {"settings": {"steps": 4}})
    assert settings == "settings changed since then: steps: 3 -> 4"
    assert libraries.startswith(f"versions changed since then: torch: 0.0.1 -> {here['torch']}: numbers may differ")
    assert list(changes_since(replace(saved, versions=here), {"settings": {"steps": 3}})) == []


def test_equal_settings_have_no_changes() -> None:
    assert changed_settings({"a": {"b": [1, 2]}}, {"a": {"b": [1, 2]}}) == []


def test_a_setting_that_was_an_empty_text_is_shown_as_one() -> None:
    assert changed_settings({"cluster": {"address": ""}}, {}) == ['cluster.address: "" -> not set']
