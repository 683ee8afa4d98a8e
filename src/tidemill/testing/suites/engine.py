"""What every rollout engine must answer. Subclass `EngineAnswersSuite` and override the fixture `make_engine`.

`EngineWeightsSuite` in `engine_weights.py` holds the other half; one test class may subclass both.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tidemill.contracts.engine import Request, RolloutEngine, Sampling
from tidemill.contracts.sample import StopReason
from tidemill.errors import EngineError
from tidemill.testing.suites.engine_case import (
    SECOND_EOS,
    EngineCase,
    MakeEngine,
    Scripted,
    hand_over,
    open_awake,
    reference_logprobs,
    requests_of,
    weights_of,
)
from tidemill.testing.tiny import EOS_ID

__all__ = ["EngineAnswersSuite"]


class EngineAnswersSuite(EngineCase):
    """`generate`, as `tidemill.contracts.engine.RolloutEngine` promises it."""

    # Truth of tokens and log-probs

    @pytest.mark.parametrize("temperature", [0.0, 0.6, 1.0, 1.3])
    def test_log_probs_are_those_of_a_full_forward_at_the_temperature(
        self, engine: RolloutEngine, model: Any, temperature: float
    ) -> None:
        sampling = Sampling(max_new_tokens=12, temperature=temperature)
        for request, answer in self.answers(engine, sampling):
            expected = reference_logprobs(model, request.token_ids, answer.token_ids, temperature)
            assert answer.logprobs == pytest.approx(expected, abs=self.tolerance)
            assert answer.version == self.version

    def test_greedy_takes_the_likeliest_token_at_each_position(self, engine: RolloutEngine, model: Any) -> None:
        for request, answer in self.answers(engine, Sampling(max_new_tokens=6, temperature=0.0)):
            ids = list(request.token_ids)
            for token in answer.token_ids:
                with torch.no_grad():
                    assert token == int(model(torch.tensor([ids])).logits[0, -1].argmax())
                ids.append(token)

    def test_a_batch_of_unequal_prompts_answers_as_one_by_one(self, engine: RolloutEngine) -> None:
        sampling = Sampling(max_new_tokens=10, temperature=0.0)
        for request, together in self.answers(engine, sampling):
            alone = engine.generate([request], sampling)[0]
            assert alone.token_ids == together.token_ids
            assert alone.logprobs == pytest.approx(together.logprobs, abs=self.tolerance)

    def test_answers_come_in_the_order_of_the_requests(self, engine: RolloutEngine) -> None:
        sampling = Sampling(max_new_tokens=4, temperature=0.0)
        requests = requests_of(self.prompts)
        forward = engine.generate(requests, sampling)
        backward = engine.generate(requests[::-1], sampling)
        assert [answer.token_ids for answer in forward] == [answer.token_ids for answer in backward[::-1]]

    def test_no_requests_have_no_answers(self, engine: RolloutEngine) -> None:
        assert engine.generate([], Sampling(max_new_tokens=4)) == []

    # Draws

    def test_equal_seed_key_and_weights_give_equal_answers_whatever_else_is_asked(self, engine: RolloutEngine) -> None:
        sampling = Sampling(max_new_tokens=8, seed=3)
        requests = requests_of(self.prompts)
        every = engine.generate(requests, sampling)
        assert engine.generate(requests, sampling) == every
        some = engine.generate(requests[1::2], sampling)
        assert [answer.token_ids for answer in some] == [answer.token_ids for answer in every[1::2]]

    def test_another_seed_or_key_gives_another_answer(self, engine: RolloutEngine) -> None:
        prompt = self.prompts[3]
        keys = [Request(key=f"0:3#{sample}", token_ids=prompt) for sample in range(4)]
        answers = engine.generate(keys, Sampling(max_new_tokens=16))
        assert len({answer.token_ids for answer in answers}) == len(keys)
        reseeded = engine.generate(keys, Sampling(max_new_tokens=16, seed=1))
        assert all(one.token_ids != other.token_ids for one, other in zip(answers, reseeded, strict=True))

    def test_top_k_and_top_p_renormalise_over_what_they_keep(self, engine: RolloutEngine, model: Any) -> None:
        sampling = Sampling(max_new_tokens=6, top_k=5, top_p=0.8)
        for request, answer in self.answers(engine, sampling):
            ids = list(request.token_ids)
            for token, logprob in zip(answer.token_ids, answer.logprobs, strict=True):
                with torch.no_grad():
                    kept = _kept(model(torch.tensor([ids])).logits[0, -1].softmax(-1).tolist(), top_k=5, top_p=0.8)
                assert logprob == pytest.approx(float(torch.tensor(kept[token]).log()), abs=self.tolerance)
                ids.append(token)

    # Ends

    def test_an_answer_ends_at_each_of_several_end_ids_and_holds_nothing_after(
        self, make_engine: MakeEngine, folder: Path, model: Any
    ) -> None:
        path = folder / "generation_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": [EOS_ID, SECOND_EOS]}))
        engine = make_engine(folder)
        open_awake(engine)
        hand_over(engine, {name: weight * 0.01 for name, weight in weights_of(model).items()}, self.version)
        requests = [Request(key=str(sample), token_ids=self.prompts[2]) for sample in range(48)]
        answers = engine.generate(requests, Sampling(max_new_tokens=60))
        for answer in answers:
            assert not {EOS_ID, SECOND_EOS} & {*answer.token_ids[:-1]}
            ended = answer.token_ids[-1] in (EOS_ID, SECOND_EOS)
            assert answer.stop_reason == (StopReason.EOS if ended else StopReason.LENGTH)
            assert ended or len(answer.token_ids) == 60
            assert len(answer.logprobs) == len(answer.token_ids)
        assert {answer.token_ids[-1] for answer in answers} >= {EOS_ID, SECOND_EOS}

    @pytest.mark.parametrize("limit", [4, 5, 6])
    def test_no_end_is_made_up_at_the_limit(self, scripted: Scripted, limit: int) -> None:
        engine, request = scripted("abcd")
        (answer,) = engine.generate([request], Sampling(max_new_tokens=limit, temperature=0.0))
        assert answer.text == "abcd"
        assert len(answer.token_ids) == min(limit, 5)
        assert (answer.token_ids[-1] == SECOND_EOS) == (limit > 4)
        assert answer.stop_reason == (StopReason.EOS if limit > 4 else StopReason.LENGTH)

    def test_an_answer_may_be_the_end_alone(self, scripted: Scripted) -> None:
        engine, request = scripted("")
        (answer,) = engine.generate([request], Sampling(max_new_tokens=3, temperature=0.0))
        assert (answer.token_ids, answer.text, answer.stop_reason) == ((SECOND_EOS,), "", StopReason.EOS)

    def test_a_stop_string_ends_an_answer_at_the_token_that_completes_it(self, scripted: Scripted) -> None:
        engine, request = scripted("xyz, to.G")
        sampling = Sampling(max_new_tokens=20, temperature=0.0, stop=(" to.", "never"))
        (answer,) = engine.generate([request], sampling)
        assert (answer.text, answer.stop_reason) == ("xyz, to.", StopReason.STOP)
        assert len(answer.logprobs) == len(answer.token_ids) == len("xyz, to.")

    def test_a_character_split_over_tokens_completes_a_stop_string_with_its_last_byte(self, scripted: Scripted) -> None:
        engine, request = scripted("aé≠b")
        for stop, text in (("é", "aé"), ("≠", "aé≠"), ("é≠", "aé≠")):
            (answer,) = engine.generate([request], Sampling(max_new_tokens=9, temperature=0.0, stop=(stop,)))
            assert (answer.text, answer.stop_reason) == (text, StopReason.STOP)
            assert len(answer.token_ids) == len(text.encode())

    def test_a_stop_token_id_ends_an_answer_besides_the_models_own(self, scripted: Scripted) -> None:
        engine, request = scripted("abcd")
        (plain,) = engine.generate([request], Sampling(max_new_tokens=9, temperature=0.0))
        third = plain.token_ids[2]
        (answer,) = engine.generate([request], Sampling(max_new_tokens=9, temperature=0.0, stop_token_ids=(third,)))
        assert answer.token_ids == plain.token_ids[:3]
        assert answer.stop_reason == StopReason.EOS

    # What cannot be answered

    def test_a_prompt_that_leaves_no_room_is_refused_with_the_numbers(self, engine: RolloutEngine) -> None:
        long = Request(key="0:9#0", token_ids=(5,) * 2040)
        with pytest.raises(EngineError, match=r"0:9#0.*2040.*20.*2060.*2048"):
            engine.generate([long], Sampling(max_new_tokens=20))

    def test_an_empty_prompt_is_refused(self, engine: RolloutEngine) -> None:
        with pytest.raises(EngineError, match="holds no token"):
            engine.generate([Request(key="a", token_ids=())], Sampling(max_new_tokens=2))


def _kept(probabilities: list[float], *, top_k: int, top_p: float) -> dict[int, float]:
    """The slow twin of the filters: ids kept, with their renormalised probabilities."""
    ordered = sorted(range(len(probabilities)), key=lambda token: (-probabilities[token], token))[:top_k]
    total = sum(probabilities[token] for token in ordered)
    kept: dict[int, float] = {}
    for token in ordered:
        if sum(kept.values()) >= top_p * total:
            break
        kept[token] = probabilities[token]
    mass = sum(kept.values())
    return {token: probability / mass for token, probability in kept.items()}
