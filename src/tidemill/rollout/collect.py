"""From prompts to scored groups: play, score, group, tell."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from tidemill.contracts.engine import Completion, Request, RolloutEngine, Sampling
from tidemill.contracts.environment import Environment, Reward
from tidemill.contracts.events import Emit, Notice, Progress, RolloutDone, phase
from tidemill.contracts.sample import Group, Prompt, Score, ScoreStatus, StopReason, Trajectory
from tidemill.errors import EnvironmentFailure, RewardError

__all__ = ["RolloutCollector"]

_UNFINISHED = (StopReason.FAILED, StopReason.ABORTED)


class RolloutCollector:
    """Implements Rollout: `samples` answers to each prompt, scored. `kind` is for the recorders.

    An answer that could not be generated keeps its place in its group as a failed score, and the others go on.
    """

    def __init__(
        self,
        *,
        environment: Environment,
        reward: Reward,
        sampling: Sampling,
        samples: int,
        emit: Emit,
        kind: Literal["train", "eval"] = "train",
    ) -> None:
        self._environment, self._reward = environment, reward
        self._sampling, self._samples = sampling, samples
        self._emit, self._kind = emit, kind

    def collect(self, engine: RolloutEngine, prompts: Sequence[Prompt]) -> list[Group]:
        """Scored groups in the order of the prompts. Needs the engine's lease.

        Raises EnvironmentFailure when no answer at all was generated, RewardError as the reward does.
        """
        with phase(self._emit, "generate", engine.name):
            episodes = self._play(engine, prompts)
        with phase(self._emit, "reward"):
            groups = self._scored(prompts, episodes)
        self._emit(RolloutDone(kind=self._kind, groups=groups))
        return groups

    def _play(self, engine: RolloutEngine, prompts: Sequence[Prompt]) -> list[list[Trajectory]]:
        what = "evaluation" if self._kind == "eval" else "rollout"
        total = len(prompts) * self._samples

        def generate(requests: Sequence[Request]) -> list[Completion]:
            return engine.generate(requests, self._sampling)

        self._emit(Progress(what=what, done=0, total=total))
        episodes = self._environment.play(generate, prompts, self._samples)
        self._emit(Progress(what=what, done=total, total=total))
        return episodes

    def _scored(self, prompts: Sequence[Prompt], episodes: list[list[Trajectory]]) -> list[Group]:
        finished = [one for group in episodes for one in group if one.stop_reason not in _UNFINISHED]
        failed = sum(map(len, episodes)) - len(finished)
        if failed and not finished:
            raise EnvironmentFailure(_all_failed([one for group in episodes for one in group]))
        if failed:
            self._emit(Notice(text=f"{failed} of {failed + len(finished)} answers failed", level="warning"))
        scores = self._reward.score(finished)
        if len(scores) != len(finished):
            raise RewardError(
                f"cannot match scores with answers: the reward gave {len(scores)} for {len(finished)} answers; "
                "return one for each"
            )
        score_of = {one.id: score for one, score in zip(finished, scores, strict=True)}
        return [
            Group(prompt=prompt, trajectories=tuple(_with_score(one, score_of) for one in group))
            for prompt, group in zip(prompts, episodes, strict=True)
        ]


def _all_failed(answers: Sequence[Trajectory]) -> str:
    ended = Counter(str(one.stop_reason) for one in answers)
    first = answers[0]
    said = f"with the text {first.text[:200]!r}" if first.text else "without a text"
    return (
        f"cannot go on: all {len(answers)} answers of this step failed "
        f"({', '.join(f'{count} {reason}' for reason, count in sorted(ended.items()))}): the first is {first.id}, "
        f"{said}; see that what environment.use and engine.use name can answer this prompt, and start the same command "
        "again: it goes on from the newest checkpoint"
    )


def _with_score(trajectory: Trajectory, score_of: dict[str, Score]) -> Trajectory:
    if trajectory.id in score_of:
        return replace(trajectory, score=score_of[trajectory.id])
    reason = f"the answer {trajectory.id} could not be generated: {trajectory.stop_reason}"
    return replace(trajectory, score=Score(value=None, status=ScoreStatus.FAILED, reason=reason))
