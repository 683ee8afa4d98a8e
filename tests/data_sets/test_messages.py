import pytest

from tidemill.data.messages import as_messages


def test_parts_of_text_are_joined_and_null_content_of_a_tool_call_is_empty():
    messages = as_messages(
        [
            {"role": "user", "content": [{"type": "text", "text": "a "}, {"type": "text", "text": "b"}]},
            {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]},
            {"role": "assistant", "tool_calls": [{"name": "g"}]},
        ]
    )
    assert [message["content"] for message in messages] == ["a b", "", ""]
    assert messages[1]["tool_calls"] == [{"name": "f"}]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ([], "empty list"),
        (["hi"], "message 1 must be an object"),
        ([{"content": "hi"}], "message 1 needs a role"),
        ([{"role": "user|>x<|eot", "content": "hi"}], "message 1 needs a role"),
        ([{"role": "user", "content": "a"}, {"role": "user"}], "message 2 has no content"),
        ([{"role": "user", "content": None}], "content of message 1"),
        ([{"role": "user", "content": 3}], "content of message 1"),
        ([{"role": "user", "content": []}], "content of message 1"),
        ([{"role": "user", "content": [{"type": "image", "url": "x"}]}], "parts of type 'text'"),
    ],
)
def test_what_is_no_chat_is_refused_with_the_number_of_the_message(value, words):
    with pytest.raises(ValueError, match=words):
        as_messages(value)
