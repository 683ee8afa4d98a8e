from tidemill.contracts.sample import StopReason
from tidemill.contracts.state import PolicyVersion
from tidemill.engines.common.answers import Answer, completions
from tidemill.testing.tiny import make_tiny_tokenizer


def test_a_text_shows_no_special_token_and_not_the_id_that_ended_the_answer() -> None:
    tokenizer = make_tiny_tokenizer()
    a, b = tokenizer("ab")["input_ids"]
    answers = [
        Answer(token_ids=[a, 1, b], logprobs=[-1.0] * 3, stop_reason=reason)
        for reason in (StopReason.EOS, StopReason.STOP, StopReason.LENGTH)
    ]
    made = completions(answers, PolicyVersion(1, 2), tokenizer)
    assert [completion.text for completion in made] == ["a", "ab", "ab"]
    assert {completion.token_ids for completion in made} == {(a, 1, b)}
    assert {completion.version for completion in made} == {PolicyVersion(1, 2)}
