import itertools

import pytest

from tidemill.rewards.outputs import BrokenContractError, entries, entry

IDS = ["a", "b"]


def test_one_entry_an_answer_passes_in_every_form_of_sequence():
    for output in ([1, 2], (1, 2), iter([1, 2]), (n for n in (1, 2)), {"b": 2, "a": 1}):
        assert entries(output, IDS) == [1, 2]


@pytest.mark.parametrize("output", [[], [1], [1, 2, 3], itertools.count(), 1, "ab", b"ab", {1, 2}, None, {"a": 1}])
def test_all_else_is_refused(output):
    with pytest.raises(BrokenContractError, match="for 2 answers"):
        entries(output, IDS)


def test_an_entry_is_a_number_nothing_or_an_object_with_a_score():
    assert entry(True) == {"value": 1.0, "reason": "", "parts": {}}
    assert entry(None)["value"] is None
    assert entry({"score": 2, "part": 0.5, "reason": "why"}) == {"value": 2.0, "reason": "why", "parts": {"part": 0.5}}


@pytest.mark.parametrize(
    "value", ["1", (1.0, "ok"), [1.0], float("nan"), float("-inf"), 10**400, {}, {"score": "1"}, 1j]
)
def test_what_is_no_finite_number_is_refused(value):
    with pytest.raises(ValueError, match="number|score"):
        entry(value)
