"""What every environment must do. Subclass `EnvironmentSuite` and give it an environment."""

from collections.abc import Sequence

import pytest

from tidemill.contracts.engine import Completion, Request
from tidemill.contracts.environment import Environment
from tidemill.contracts.sample import Prompt, StopReason
from tidemill.contracts.state import PolicyVersion

__all__ = ["EnvironmentSuite", "echo"]

_PROMPTS = [Prompt(id=str(n), key=f"0:{n}", token_ids=(n, n + 1), text=f"prompt {n}") for n in range(3)]


def echo(requests: Sequence[Request]) -> list[Completion]:
    """Answers that repeat their request; the engine behind the suite."""
    return [
        Completion(
            token_ids=(*request.token_ids, 2),
            logprobs=(*(-0.5 for _ in request.token_ids), -0.25),
            stop_reason=StopReason.EOS,
            version=PolicyVersion(1, 4),
            text=request.key,
        )
        for request in requests
    ]


class EnvironmentSuite:
    """Override the fixture `environment`."""

    @pytest.fixture
    def environment(self) -> Environment:
        """The environment to try."""
        raise NotImplementedError("override the fixture `environment`")

    def test_every_prompt_has_its_samples_in_order(self, environment: Environment) -> None:
        episodes = environment.play(echo, _PROMPTS, 2)
        assert [[episode.id for episode in group] for group in episodes] == [
            [f"{prompt.key}#0", f"{prompt.key}#1"] for prompt in _PROMPTS
        ]

    def test_no_request_key_is_used_twice(self, environment: Environment) -> None:
        keys: list[str] = []

        def generate(requests: Sequence[Request]) -> list[Completion]:
            keys.extend(request.key for request in requests)
            return echo(requests)

        environment.play(generate, _PROMPTS, 3)
        assert len(set(keys)) == len(keys) >= 9

    def test_sampled_ids_and_log_probs_are_kept_as_they_are(self, environment: Environment) -> None:
        """Whatever a mask lets through is a token that was sampled, with its own log-prob and version."""
        sampled: set[tuple[int, float]] = set()

        def generate(requests: Sequence[Request]) -> list[Completion]:
            completions = echo(requests)
            for completion in completions:
                sampled.update(zip(completion.token_ids, completion.logprobs, strict=True))
            return completions

        for group in environment.play(generate, _PROMPTS, 2):
            for episode in group:
                assert any(episode.loss_mask)
                pairs = zip(episode.token_ids, episode.logprobs, strict=True)
                masked = [pair for pair, kept in zip(pairs, episode.loss_mask, strict=True) if kept]
                assert set(masked) <= sampled
                assert episode.version == PolicyVersion(1, 4)

    def test_nothing_is_scored(self, environment: Environment) -> None:
        assert all(episode.score is None for group in environment.play(echo, _PROMPTS, 1) for episode in group)

    def test_a_failed_episode_is_a_trajectory_that_says_so(self, environment: Environment) -> None:
        def generate(requests: Sequence[Request]) -> list[Completion]:
            failure = Completion(
                token_ids=(), logprobs=(), stop_reason=StopReason.FAILED, version=PolicyVersion(1, 4), text=""
            )
            return [failure if request.key.endswith("#1") else echo([request])[0] for request in requests]

        for group in environment.play(generate, _PROMPTS, 2):
            assert [episode.stop_reason for episode in group] == [StopReason.EOS, StopReason.FAILED]
