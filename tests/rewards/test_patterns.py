from tidemill.rewards.answer import Answer
from tidemill.rewards.patterns import last_match_is_label


def test_each_answer_is_searched_by_itself():
    fields = {"id": "a", "prompt": "", "prompt_id": "", "sample": 0, "extra": {}, "token_ids": [], "stop_reason": "eos"}
    answers = [Answer.of({**fields, "text": text, "label": "7"}) for text in ("5 7", "7 5", "")]
    assert last_match_is_label(answers, pattern=r"\d") == [1.0, 0.0, 0.0]
