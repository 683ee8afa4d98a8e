import json
from pathlib import Path

import pytest

from tidemill.contracts.engine import Completion
from tidemill.contracts.sample import Prompt, StopReason
from tidemill.contracts.state import PolicyVersion
from tidemill.environments.single_turn import SingleTurn
from tidemill.errors import EnvironmentFailure
from tidemill.testing.suites.environment import EnvironmentSuite, echo

CASES = Path(__file__).parents[1] / "data"
PROMPT = Prompt(id="q", key="0:q", token_ids=(1, 2), text="")


class TestSingleTurn(EnvironmentSuite):
    @pytest.fixture
    def environment(self):
        return SingleTurn()


def test_the_key_of_a_request_is_the_id_of_its_trajectory_and_all_are_asked_at_once():
    calls = []

    def generate(requests):
        calls.append([request.key for request in requests])
        return echo(requests)

    (group,) = SingleTurn().play(generate, [PROMPT], 3)
    assert calls == [[trajectory.id for trajectory in group]] == [["0:q#0", "0:q#1", "0:q#2"]]


@pytest.mark.parametrize(
    "row", json.loads((CASES / "tokens_not_canonical.json").read_text())["rows"], ids=lambda r: r["name"]
)
def test_what_was_sampled_is_never_encoded_again(row):
    def generate(requests):
        ids = tuple(row["sampled_ids"])
        return [
            Completion(
                token_ids=ids,
                logprobs=(-1.0,) * len(ids),
                stop_reason=StopReason.LENGTH,
                version=PolicyVersion(0, 0),
                text=row["text"],
            )
            for _ in requests
        ]

    ((trajectory,),) = SingleTurn().play(generate, [PROMPT], 1)
    assert trajectory.token_ids == tuple(row["sampled_ids"])
    assert trajectory.loss_mask == (True,) * len(row["sampled_ids"])
    assert trajectory.text == row["text"]


def test_a_lost_answer_is_a_fault_and_not_a_shift():
    with pytest.raises(EnvironmentFailure, match="gave 1 for 2 requests"):
        SingleTurn().play(lambda requests: echo(requests)[:1], [PROMPT], 2)
