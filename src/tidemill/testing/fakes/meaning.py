"""Fakes of data, environment, reward, algorithm and recorder: small, pure, complete."""

import contextlib
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from tidemill.contracts.algorithm import Loss
from tidemill.contracts.batch import Batch, StepReport
from tidemill.contracts.checkpoint import Saved, Snapshot
from tidemill.contracts.engine import Request, RolloutEngine, Sampling
from tidemill.contracts.events import Event
from tidemill.contracts.recorder import StepRecord
from tidemill.contracts.sample import Group, Prompt, Score, Trajectory
from tidemill.contracts.state import Cursor, PolicyVersion, RunState
from tidemill.contracts.trainer import Trainer

__all__ = [
    "FakeAgreement",
    "FakeAlgorithm",
    "FakeData",
    "FakeEvaluation",
    "FakeRecorder",
    "FakeRollout",
    "FakeStop",
    "FakeWarmUp",
]


class FakeData:
    """Ten prompts an epoch, each epoch in an order of its own, `count` a step, across the epoch's end."""

    def __init__(self, *, rows: int = 10, count: int = 4, seed: int = 0) -> None:
        self.rows, self.count, self.seed = rows, count, seed

    def take(self, cursor: Cursor) -> tuple[list[Prompt], Cursor]:
        """Pure: equal cursors, equal prompts."""
        prompts: list[Prompt] = []
        epoch, position, digest = cursor.epoch, cursor.position, cursor.digest
        while len(prompts) < self.count:
            order = np.random.default_rng([self.seed, epoch]).permutation(self.rows).tolist()
            row = order[position]
            text = f"row {row}"
            prompts.append(Prompt(id=str(row), key=f"{epoch}:{row}", token_ids=(row, epoch % 7), text=text, label=row))
            digest = hashlib.blake2b(f"{digest}/{row}".encode(), digest_size=8).hexdigest()
            position += 1
            if position == self.rows:
                epoch, position, digest = epoch + 1, 0, ""
        return prompts, Cursor(epoch=epoch, position=position, digest=digest)


class FakeRollout:
    """Two answers a prompt; the reward is one if the first token is even."""

    def __init__(self, *, samples: int = 2, seed: int = 0) -> None:
        self.samples, self.seed = samples, seed

    def collect(self, engine: RolloutEngine, prompts: Sequence[Prompt]) -> list[Group]:
        """Generate, score, group."""
        requests = [Request(key=f"{p.key}#{i}", token_ids=p.token_ids) for p in prompts for i in range(self.samples)]
        answers = iter(engine.generate(requests, Sampling(max_new_tokens=4, seed=self.seed)))
        groups = []
        for prompt in prompts:
            members = []
            for sample in range(self.samples):
                answer = next(answers)
                members.append(
                    Trajectory(
                        prompt=prompt,
                        sample=sample,
                        token_ids=answer.token_ids,
                        logprobs=answer.logprobs,
                        loss_mask=(True,) * len(answer.token_ids),
                        version=answer.version,
                        stop_reason=answer.stop_reason,
                        text=answer.text,
                        score=Score(value=float(answer.token_ids[0] % 2 == 0)),
                    )
                )
            groups.append(Group(prompt=prompt, trajectories=tuple(members)))
        return groups


class FakeAgreement:
    """Looks at versions, and scores without an opinion: a trainer without its lease shows."""

    def check(self, trainer: Trainer, groups: Sequence[Group], batch: Batch, version: PolicyVersion) -> None:
        """Every answer is of the present version."""
        assert {member.version for group in groups for member in group.trajectories} <= {version}
        assert len(trainer.log_probs(batch)) == batch.tokens

    def measured(self, groups: Sequence[Group], batch: Batch, report: StepReport) -> StepReport:
        """As it is."""
        return report


def no_loss(inputs: object) -> Any:
    """The fake trainer looks at the batch alone."""
    raise AssertionError("the fake trainer computes no loss")


class FakeAlgorithm:
    """Rows as they are; the reward is the advantage."""

    @property
    def loss(self) -> Loss:
        """Never called."""
        return no_loss

    def batch(self, groups: Sequence[Group]) -> Batch:
        """All trajectories, end to end."""
        members = [member for group in groups for member in group.trajectories]
        return pack_rows([(m.prompt.token_ids, m.token_ids, m.logprobs, m.reward or 0.0) for m in members])


class FakeWarmUp:
    """Supervised rows whose answer is the prompt's id."""

    def __init__(self, *, steps: int, data: FakeData) -> None:
        self.steps, self.data = steps, data

    @property
    def loss(self) -> Loss:
        """Never called."""
        return no_loss

    def batch(self, cursor: Cursor) -> tuple[Batch, Cursor]:
        """The next rows."""
        prompts, cursor = self.data.take(cursor)
        return pack_rows([(p.token_ids, (int(p.id),), (0.0,), 1.0) for p in prompts]), cursor


def pack_rows(rows: Sequence[tuple[tuple[int, ...], tuple[int, ...], tuple[float, ...], float]]) -> Batch:
    """Rows of (prompt ids, answer ids, log-probs, advantage), laid end to end."""
    lengths = [len(prompt) + len(answer) for prompt, answer, _, _ in rows]
    return Batch(
        token_ids=np.array([token for prompt, answer, _, _ in rows for token in (*prompt, *answer)], dtype=np.int64),
        offsets=np.cumsum([0, *lengths], dtype=np.int64),
        loss_mask=np.array([i >= len(p) for p, a, _, _ in rows for i in range(len(p) + len(a))], dtype=np.bool_),
        logprobs=np.array([x for p, _, lps, _ in rows for x in (*[0.0] * len(p), *lps)], dtype=np.float32),
        advantages=np.array([adv for p, a, _, adv in rows for _ in range(len(p) + len(a))], dtype=np.float32),
        metrics={},
    )


class FakeEvaluation:
    """Notes where it was asked, and generates, so that a stale engine shows."""

    def __init__(self, *, every: int = 2) -> None:
        self.every = every
        self.done: list[int] = []

    def if_due(self, engine: RolloutEngine, state: RunState) -> None:
        """At every n-th step."""
        if state.step % self.every == 0:
            self._evaluate(engine, state)

    def final(self, engine: RolloutEngine, state: RunState) -> None:
        """At the end."""
        self._evaluate(engine, state)

    def _evaluate(self, engine: RolloutEngine, state: RunState) -> None:
        answers = engine.generate([Request(key="eval", token_ids=(1,))], Sampling(max_new_tokens=4, temperature=0.0))
        assert answers[0].version.step == state.step
        self.done.append(state.step)


class FakeRecorder:
    """Keeps one line a step, cut on resume as a real one."""

    name = "recorder"

    def __init__(self, lines: dict[int, dict[str, Any]]) -> None:
        self.lines = lines
        self.events: list[Event] = []

    @contextlib.contextmanager
    def step(self, step: int) -> Iterator[StepRecord]:
        """The line is written when the update is done."""

        def record(*, groups: Sequence[Group], batch: Batch, report: StepReport) -> None:
            assert step not in self.lines, f"step {step} is recorded twice"
            ids = [member.id for group in groups for member in group.trajectories]
            tokens = [member.token_ids for group in groups for member in group.trajectories]
            self.lines[step] = {"ids": ids, "tokens": tokens, **report.metrics}

        yield record

    def start(self, step: int) -> None:
        """Drop what is to be done again."""
        for later in [line for line in self.lines if line >= step]:
            del self.lines[later]

    def emit(self, event: Event) -> None:
        """Keep it."""
        self.events.append(event)

    def snapshot(self) -> Snapshot:
        """The number of lines."""
        return Snapshot(extra={"lines": len(self.lines)})

    def load(self, saved: Saved) -> None:
        """Nothing to take on: `start` cuts."""
        extra: Mapping[str, Any] = saved.extra
        assert extra["lines"] <= len(self.lines), "lines were lost"

    def close(self) -> None:
        """Nothing is open."""


class FakeStop:
    """No signal ever arrives, unless a test calls `request`."""

    def __init__(self) -> None:
        self.error: BaseException | None = None

    def request(self, error: BaseException) -> None:
        """Raise this at the next chance."""
        self.error = error

    @contextlib.contextmanager
    def at_once(self) -> Iterator[None]:
        """Raises at the border."""
        self.check()
        yield

    def check(self) -> None:
        """Raises what was requested."""
        if self.error is not None:
            raise self.error
