import math

import pytest

from tidemill.contracts.sample import StopReason
from tidemill.contracts.state import PolicyVersion
from tidemill.engines.common.answers import Answer, completions
from tidemill.errors import EngineError
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


def test_log_probs_that_are_not_finite_are_refused_with_their_place() -> None:
    answers = [
        Answer(token_ids=[5, 6], logprobs=[-0.5, -1.0], stop_reason=StopReason.LENGTH),
        Answer(token_ids=[5, 6], logprobs=[-0.5, math.nan], stop_reason=StopReason.LENGTH),
    ]
    with pytest.raises(EngineError, match="1 of 2 answers.*first at token 1.*NaN in the weights"):
        completions(answers, PolicyVersion(1, 3), None)
