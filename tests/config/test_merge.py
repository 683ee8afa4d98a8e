"""tidemill.config.merge against a slow twin: assign each value in order, clearing what stands in the way."""

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from tidemill.config.merge import Setting, Tree, at, flatten, merged, plain, read_word

_KEYS = st.sampled_from("abc")
_TREES: st.SearchStrategy[dict[str, Any]] = st.recursive(
    st.dictionaries(_KEYS, st.integers(0, 9) | st.lists(st.integers(0, 3), max_size=2), max_size=3),
    lambda inner: st.dictionaries(_KEYS, inner | st.integers(0, 9), max_size=3),
    max_leaves=8,
)


def _tree(values: dict[str, Any], origin: str) -> Tree:
    return {k: _tree(v, origin) if isinstance(v, dict) else Setting(v, origin) for k, v in values.items()}


def _assigned(into: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    for key, value in values.items():
        if isinstance(value, dict):
            if not isinstance(into.get(key), dict):
                into[key] = {}
            _assigned(into[key], value)
        else:
            into[key] = value
    return into


@settings(max_examples=200, deadline=None)
@given(_TREES, _TREES, _TREES)
def test_merging_is_assigning_in_order(first: dict[str, Any], second: dict[str, Any], third: dict[str, Any]) -> None:
    tree = merged(merged(_tree(first, "1"), _tree(second, "2")), _tree(third, "3"))
    expected: dict[str, Any] = {}
    for values in (first, second, third):
        expected = _assigned(expected, values)
    assert plain(tree) == expected


@settings(max_examples=100, deadline=None)
@given(_TREES, _TREES)
def test_every_value_keeps_the_origin_of_its_last_writer(first: dict[str, Any], second: dict[str, Any]) -> None:
    later = _tree(second, "later")
    tree = merged(_tree(first, "earlier"), later)
    written = {path for path, _ in flatten(later)}
    for path, setting in flatten(tree):
        assert (setting.origin == "later") == (path in written)


@settings(max_examples=100, deadline=None)
@given(_TREES, _TREES)
def test_merging_changes_neither_side_and_twice_is_once(first: dict[str, Any], second: dict[str, Any]) -> None:
    one, two = _tree(first, "1"), _tree(second, "2")
    result = merged(one, two)
    assert one == _tree(first, "1") and two == _tree(second, "2")
    assert merged(result, two) == result
    assert merged(one, {}) == one and merged({}, two) == two


def test_a_word_is_toml_or_text() -> None:
    cases = {"1": 1, "1e-6": 1e-6, "true": True, '"x"': "x", "[1, 2]": [1, 2], "x y": "x y", "": "", "'": "'"}
    for text, value in cases.items():
        assert plain(read_word(f"a.b={text}")) == {"a": {"b": value}}, text


def test_looking_below_a_value_finds_the_value() -> None:
    assert at(read_word("a=1"), ("a", "b", "c")) == Setting(1, "command line", "1")
    assert at({}, ("a",)) is None
