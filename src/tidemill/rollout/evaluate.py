"""Evaluation of the present weights on held-out prompts, between updates and at the end."""

from collections.abc import Sequence

from tidemill.contracts.engine import RolloutEngine, Sampling
from tidemill.contracts.environment import Environment, Reward
from tidemill.contracts.events import Emit, Evaluated, Event, Notice, PhaseDone, phase
from tidemill.contracts.sample import Prompt
from tidemill.contracts.state import RunState
from tidemill.rollout.collect import RolloutCollector
from tidemill.rollout.metrics import rollout_metrics

__all__ = ["Evaluator", "NoEvaluation"]

_NAMES = {
    "reward/failed": "eval/failed",
    "reward/abstained": "eval/abstained",
    "rollout/tokens_mean": "eval/tokens_mean",
    "rollout/truncated": "eval/truncated",
}


class NoEvaluation:
    """Implements Evaluation by doing nothing."""

    def if_due(self, engine: RolloutEngine, state: RunState) -> None:
        """Never is."""

    def final(self, engine: RolloutEngine, state: RunState) -> None:
        """Nothing to do."""


class Evaluator:
    """Implements Evaluation: due every `every` steps (0 for never), before the first only with `before_training`.

    `metric` names the mean reward. `first_step` is the step at which training by reward begins, behind any supervised
    steps. Answers of every evaluation are drawn alike, so that what differs is the policy.
    """

    def __init__(
        self,
        *,
        prompts: Sequence[Prompt],
        environment: Environment,
        reward: Reward,
        sampling: Sampling,
        samples: int,
        every: int,
        before_training: bool,
        emit: Emit,
        metric: str = "eval/reward",
        first_step: int = 0,
    ) -> None:
        self._prompts, self._metric, self._emit = tuple(prompts), metric, emit
        self._every, self._before_training, self._first_step = every, before_training, first_step
        self._collector = RolloutCollector(
            environment=environment,
            reward=reward,
            sampling=sampling,
            samples=samples,
            emit=self._without_phases,
            kind="eval",
        )

    def if_due(self, engine: RolloutEngine, state: RunState) -> None:
        """Evaluate when the schedule says so; needs the engine's lease."""
        if state.step <= self._first_step:
            due = self._before_training
        else:
            due = self._every > 0 and state.step % self._every == 0
        if due:
            self._evaluate(engine)

    def final(self, engine: RolloutEngine, state: RunState) -> None:
        """Evaluate the end of the run."""
        self._evaluate(engine)

    def _evaluate(self, engine: RolloutEngine) -> None:
        with phase(self._emit, "evaluate", engine.name):
            numbers = rollout_metrics(self._collector.collect(engine, self._prompts))
        values = {ours: numbers[theirs] for theirs, ours in _NAMES.items()}
        if "reward/mean" in numbers:
            values = {self._metric: numbers["reward/mean"], **values}
        else:
            self._emit(Notice(text="no answer of the evaluation has a reward: it has no result", level="warning"))
        self._emit(Evaluated(values=values))

    def _without_phases(self, event: Event) -> None:
        """Time of an evaluation is one phase: `time/generate` is that of training."""
        if not isinstance(event, PhaseDone):
            self._emit(event)
