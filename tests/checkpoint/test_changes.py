"""Settings that changed between two starts (`tidemill.checkpoint.changes`)."""

from tidemill.checkpoint.changes import changed_settings


def test_each_changed_setting_is_named_with_both_values() -> None:
    saved = {"steps": 4, "trainer": {"optimizer": {"lr": 1e-4, "betas": [0.9, 0.95]}}, "old": 1}
    now = {"steps": 8, "trainer": {"optimizer": {"lr": 5e-5, "betas": [0.9, 0.95]}}, "new": {"x": True}}
    assert changed_settings(saved, now) == [
        "new.x: not set -> True",
        "old: 1 -> not set",
        "steps: 4 -> 8",
        "trainer.optimizer.lr: 0.0001 -> 5e-05",
    ]


def test_equal_settings_have_no_changes() -> None:
    assert changed_settings({"a": {"b": [1, 2]}}, {"a": {"b": [1, 2]}}) == []


def test_a_setting_that_was_an_empty_text_is_shown_as_one() -> None:
    assert changed_settings({"cluster": {"address": ""}}, {}) == ['cluster.address: "" -> not set']
