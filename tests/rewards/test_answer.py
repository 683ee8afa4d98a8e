import pytest

from tidemill.rewards.answer import Answer

FIELDS = {
    "id": "0:q#1",
    "text": "four",
    "prompt": "2+2",
    "prompt_id": "q",
    "sample": 1,
    "label": "4",
    "extra": {},
    "token_ids": [3, 4],
    "stop_reason": "eos",
}


def test_an_answer_is_its_text():
    answer = Answer.of(FIELDS)
    assert answer == "four"
    assert answer.startswith("f")
    assert len(answer) == 4
    assert str(answer) == f"{answer}" == "four"
    assert type(answer.text) is str


def test_attributes_tell_where_it_comes_from():
    answer = Answer.of(FIELDS)
    assert (answer.id, answer.prompt, answer.prompt_id, answer.sample) == ("0:q#1", "2+2", "q", 1)
    assert (answer.label, answer.token_ids, answer.stop_reason) == ("4", (3, 4), "eos")


def test_it_cannot_be_changed():
    with pytest.raises(AttributeError, match="cannot be changed"):
        Answer.of(FIELDS).label = "5"
