"""tidemill.rollout.agreement, with a trainer that knows what it would have said."""

import math
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tidemill.algorithms.grpo import Grpo
from tidemill.contracts.batch import Batch, StepReport
from tidemill.contracts.events import Event, Notice, PhaseDone, TokensApart
from tidemill.contracts.sample import Group, Prompt, Score, StopReason, Trajectory
from tidemill.contracts.state import PolicyVersion
from tidemill.errors import EngineError
from tidemill.rollout.agreement import EngineAgreement, NoAgreement

VERSION = PolicyVersion(2, 7)
TEMPERATURE = 0.6


def group(row: int, *, off: float = 0.0, version: PolicyVersion = VERSION, answer: int = 5) -> Group:
    """Two answers; the engine's log-probs are `off` from -1, 0.1 more with each token, at its temperature."""
    prompt = Prompt(id=str(row), key=f"0:{row}", token_ids=(1, 2, 3 + row), text="?", label=None)
    members = tuple(
        Trajectory(
            prompt=prompt,
            sample=sample,
            token_ids=tuple(range(20, 20 + answer)),
            logprobs=tuple(-1.0 - 0.1 * place - off for place in range(answer)),
            loss_mask=(True,) * answer,
            version=version,
            stop_reason=StopReason.EOS,
            score=Score(value=float(sample)),
        )
        for sample in range(2)
    )
    return Group(prompt=prompt, trajectories=members)


def batch_of(groups: Sequence[Group]) -> Batch:
    return Grpo(clip_low=0.2, clip_high=0.2, normalize_std=True, temperature=TEMPERATURE).batch(groups)


class KnowingTrainer:
    """Says of each answer what `group` says at `off` 0; at another temperature than the engine's, something else."""

    name = "trainer"

    def __init__(self, temperature: float = TEMPERATURE) -> None:
        self.temperature, self.asked = temperature, []

    def log_probs(self, batch: Batch) -> np.ndarray[Any, Any]:
        self.asked.append(batch)
        found = np.zeros(batch.tokens, np.float32)
        for start, end in zip(batch.offsets[:-1], batch.offsets[1:], strict=True):
            found[start + 1 : end] = -0.8 - 0.1 * np.arange(end - start - 1)
        return found if batch.temperature == self.temperature else 2 * found


def watch(limit: float, events: list[Event]) -> EngineAgreement:
    return EngineAgreement(limit=limit, decode=lambda ids: " ".join(map(str, ids)), emit=events.append)


def trainer_of(temperature: float = TEMPERATURE) -> Any:
    return KnowingTrainer(temperature)


def test_the_check_is_made_once_and_says_what_it_found() -> None:
    events: list[Event] = []
    one, trainer = watch(0.01, events), trainer_of()
    groups = [group(row) for row in range(3)]
    for _ in range(3):
        one.check(trainer, groups, batch_of(groups), VERSION)
    assert len(trainer.asked) == 1
    notices = [event for event in events if isinstance(event, Notice)]
    assert [event.name for event in events if isinstance(event, PhaseDone)] == ["self_check"]
    assert len(notices) == 1 and "agree on 30 tokens of 6 answers" in notices[0].text
    assert notices[0].details["mismatch/ratio"] == pytest.approx(1.0, abs=1e-5)


def test_answers_that_differ_are_refused_with_the_numbers_and_again_when_asked_again() -> None:
    one, groups = watch(0.05, []), [group(0, off=0.3)]
    for _ in range(2):
        with pytest.raises(EngineError, match=r"0\.3 nats in the mean, more than rollout.max_mismatch = 0\.05"):
            one.check(trainer_of(), groups, batch_of(groups), VERSION)


def test_log_probs_without_the_temperature_are_told_by_name() -> None:
    groups = [group(0)]
    with pytest.raises(EngineError, match=r"agree at temperature 1.*samples at \(0\.6\)"):
        watch(0.05, []).check(trainer_of(1.0), groups, batch_of(groups), VERSION)


def test_log_probs_that_are_no_numbers_do_not_pass() -> None:
    batch = batch_of([group(0)])
    broken = replace(batch, logprobs=np.where(batch.loss_mask, np.nan, 0).astype(np.float32))
    with pytest.raises(EngineError, match="cannot train on these answers"):
        watch(0.05, []).check(trainer_of(), [group(0)], broken, VERSION)


def test_answers_of_other_weights_are_refused_at_every_step() -> None:
    one, trainer = watch(0.05, []), trainer_of()
    fresh, stale = [group(0)], [group(0), group(1, version=PolicyVersion(2, 6))]
    one.check(trainer, fresh, batch_of(fresh), VERSION)
    with pytest.raises(EngineError, match=r"0:1#0: .*version 6 \(attempt 2\).*version 7 \(attempt 2\)"):
        one.check(trainer, stale, batch_of(stale), VERSION)


def test_a_batch_without_a_token_to_train_on_leaves_the_check_to_the_next() -> None:
    one, trainer, groups = watch(0.05, []), trainer_of(), [group(0)]
    nothing = replace(batch_of(groups), loss_mask=np.zeros(16, np.bool_))
    one.check(trainer, groups, nothing, VERSION)
    assert trainer.asked == []
    one.check(trainer, groups, batch_of(groups), VERSION)
    assert len(trainer.asked) == 1


@pytest.mark.parametrize(("groups", "answer", "rows"), [(3, 5, 6), (100, 5, 64), (20, 3000, 10), (2, 40_000, 1)])
def test_as_many_rows_are_scored_as_are_quickly_scored(groups: int, answer: int, rows: int) -> None:
    trainer = trainer_of()
    made = [group(row, answer=answer) for row in range(groups)]
    watch(1e9, []).check(trainer, made, batch_of(made), VERSION)
    (asked,) = trainer.asked
    assert asked.rows == rows
    assert asked.rows == 1 or asked.tokens <= 32_768
    prompts = {int(asked.token_ids[start + 2]) for start in asked.offsets[:-1]}
    assert rows in (1, 10) or {3, 2 + groups} <= prompts, "spread over the batch"


def test_without_a_limit_nothing_is_scored_and_nothing_warned_of() -> None:
    events: list[Event] = []
    one, trainer, groups = watch(math.inf, events), trainer_of(), [group(0, off=5.0)]
    one.check(trainer, groups, batch_of(groups), VERSION)
    report = measured(one, groups)
    assert trainer.asked == []
    assert report.metrics["mismatch/logprob_abs_mean"] == pytest.approx(5.0)
    assert not [event for event in events if isinstance(event, Notice)]


def measured(one: EngineAgreement | NoAgreement, groups: Sequence[Group]) -> StepReport:
    batch = batch_of(groups)
    logprobs = trainer_of().log_probs(batch) * batch.loss_mask
    return one.measured(groups, batch, StepReport(metrics={"policy/loss": 1.0}, logprobs=logprobs))


def test_a_step_has_its_numbers_and_its_worst_tokens_by_name() -> None:
    events: list[Event] = []
    report = measured(watch(10.0, events), [group(0), group(1, off=0.3)])
    assert report.metrics["policy/loss"] == 1.0
    assert report.metrics["mismatch/logprob_abs_mean"] == pytest.approx(0.15, abs=1e-5)
    assert report.metrics["mismatch/apart"] == 0.5
    (told,) = events
    assert isinstance(told, TokensApart) and len(told.tokens) == 8
    found = {(token.trajectory, token.position) for token in told.tokens}
    assert {name for name, _ in found} == {"0:1#0", "0:1#1"}
    worst = SimpleNamespace(**vars(next(token for token in told.tokens if token.position == 2)))
    assert (worst.token_id, worst.text, worst.before, worst.version) == (22, "22", "1 2 4 20 21", 7)
    assert (worst.engine, worst.trainer) == pytest.approx((-1.5, -1.2))


def test_coming_apart_is_warned_of_when_it_begins_and_when_it_has_doubled() -> None:
    events: list[Event] = []
    one = watch(0.05, events)
    warned = []
    for off in (0.01, 0.04, 0.06, 0.1, 0.11, 0.13, 0.2, 0.3):
        measured(one, [group(0, off=off)])
        warned.append(sum(isinstance(event, Notice) and event.level == "warning" for event in events))
    assert warned == [0, 0, 1, 1, 1, 2, 2, 3]


def test_demonstrations_and_replays_are_measured_and_never_refused() -> None:
    one, groups = NoAgreement(), [group(0, off=0.3, version=PolicyVersion(0, 0))]
    one.check(trainer_of(), groups, batch_of(groups), VERSION)
    assert measured(one, groups).metrics["mismatch/logprob_abs_mean"] == pytest.approx(0.3)
