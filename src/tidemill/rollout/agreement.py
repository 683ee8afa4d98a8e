"""Engine and trainer must give the same tokens the same log-probs: checked once a start, and watched ever after.

The check at the start is an update at learning rate zero without the update: the trainer scores some of the first
answers that the engine sampled, under the weights that it just handed over. It needs no extra rollout, draws nothing
and changes nothing. What it finds: an engine that serves the weights of its model folder, or half of those handed over,
or reports log-probs at another temperature, or mixes tokens up.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from jaxtyping import Int64

from tidemill.algorithms.deal import rows_to_train, share_of
from tidemill.contracts.batch import Batch, StepReport
from tidemill.contracts.events import Emit, Notice, TokenApart, TokensApart, phase
from tidemill.contracts.sample import Group, Trajectory
from tidemill.contracts.state import PolicyVersion
from tidemill.contracts.trainer import Trainer
from tidemill.errors import EngineError
from tidemill.rollout.mismatch import Mismatch, compare

__all__ = ["EngineAgreement", "NoAgreement"]

_CHECKED_ROWS = 64
_CHECKED_TOKENS = 32_768
_WORST = 8
_CONTEXT = 12  # tokens before the one that is shown

Decode = Callable[[Sequence[int]], str]


class NoAgreement:
    """Implements contracts.parts.Agreement for answers that no engine of this run sampled."""

    def check(self, trainer: Trainer, groups: Sequence[Group], batch: Batch, version: PolicyVersion) -> None:
        """There is nothing to agree with."""

    def measured(self, groups: Sequence[Group], batch: Batch, report: StepReport) -> StepReport:
        """With the numbers all the same."""
        return _with_metrics(report, compare(batch, report.logprobs))


class EngineAgreement:
    """Implements contracts.parts.Agreement. `limit` is the most that log-probs may differ in the mean, in nats.

    Beyond it the check at the start refuses, and a later step warns; infinity never does. `decode` makes text of token
    ids, for people.
    """

    def __init__(self, *, limit: float, decode: Decode, emit: Emit) -> None:
        self._limit, self._decode, self._emit = limit, decode, emit
        self._checked = False
        self._warned = limit / 2

    def check(self, trainer: Trainer, groups: Sequence[Group], batch: Batch, version: PolicyVersion) -> None:
        """Score some answers of the first batch that has any; afterwards only versions are looked at.

        Raises EngineError for answers of other weights than `version`, and when log-probs differ by more than the
        limit: nothing has been learned from them then.
        """
        _check_versions(groups, version)
        rows = _some(batch)
        if self._checked or math.isinf(self._limit) or not len(rows):
            return
        part = share_of(batch, rows).batch
        with phase(self._emit, "self_check", trainer.name):
            found = compare(part, trainer.log_probs(part))
        if not found.tokens:
            return
        if not found.mean <= self._limit:
            raise EngineError(self._refusal(trainer, part, found))
        self._checked = True
        numbers = found.metrics()
        self._emit(
            Notice(
                text=f"self-check: engine and trainer agree on {found.tokens:,} tokens of {len(rows)} answers: "
                f"log-probs differ by {found.mean:.2g} nats in the mean, {numbers['mismatch/logprob_abs_max']:.2g} at "
                f"most (limit for the mean {self._limit:g})",
                details={"tokens": found.tokens, "limit": self._limit, **numbers},
            )
        )

    def measured(self, groups: Sequence[Group], batch: Batch, report: StepReport) -> StepReport:
        """The report with `mismatch/*`; tells the worst tokens, and warns of a mean that has doubled past the limit."""
        found = compare(batch, report.logprobs)
        if found.tokens:
            self._emit(TokensApart(tokens=self._worst(groups, batch, found)))
        if found.mean > max(self._limit, 2 * self._warned):
            self._warned = found.mean
            self._emit(
                Notice(
                    text=f"engine and trainer have come apart: log-probs differ by {found.mean:.2g} nats in the mean, "
                    f"more than rollout.max_mismatch = {self._limit:g}; the run page lists the worst tokens",
                    level="warning",
                )
            )
        return _with_metrics(report, found)

    def _refusal(self, trainer: Trainer, part: Batch, found: Mismatch) -> str:
        numbers = found.metrics()
        said = f"{numbers.get('mismatch/apart', 1.0):.0%} of {found.tokens:,} tokens are more than 0.1 nats apart"
        return (
            f"cannot train on these answers: the engine's log-probs differ from the trainer's by {found.mean:.2g} nats "
            f"in the mean, more than rollout.max_mismatch = {self._limit:g} ({said}), under what should be the same "
            f"weights; {self._hint(trainer, part)}"
        )

    def _hint(self, trainer: Trainer, part: Batch) -> str:
        """Whether leaving the temperature out would explain it; else where to look."""
        if part.temperature != 1.0:
            plain = replace(part, temperature=1.0)
            if compare(plain, trainer.log_probs(plain)).mean <= self._limit:
                return (
                    "they agree at temperature 1: the engine does not report log-probs at the temperature that it "
                    f"samples at ({part.temperature:g}); set its option for processed log-probs, or "
                    "rollout.sampling.temperature = 1"
                )
        return (
            "see that the engine serves the weights that were handed to it (a deep sleep, a half update or a stale "
            "prefix cache would look so), that it computes the same model (rope, sliding window, tied head), and that "
            "no engine option changes logits; where precision alone explains it, raise rollout.max_mismatch"
        )

    def _worst(self, groups: Sequence[Group], batch: Batch, found: Mismatch) -> tuple[TokenApart, ...]:
        members = [member for group in groups for member in group.trajectories]
        return tuple(self._token(members, batch, found, int(index)) for index in found.worst(_WORST))

    def _token(self, members: Sequence[Trajectory], batch: Batch, found: Mismatch, index: int) -> TokenApart:
        at = int(found.positions[index])
        row = int(np.searchsorted(batch.offsets, at, side="right")) - 1
        begin = max(int(batch.offsets[row]), at - _CONTEXT)
        member = members[row]
        return TokenApart(
            trajectory=member.id,
            version=member.version.step,
            position=at - int(batch.offsets[row]) - len(member.prompt.token_ids),
            token_id=int(batch.token_ids[at]),
            text=self._decode(batch.token_ids[at : at + 1].tolist()),
            before=self._decode(batch.token_ids[begin:at].tolist()),
            engine=float(found.engine[index]),
            trainer=float(found.trainer[index]),
        )


def _with_metrics(report: StepReport, found: Mismatch) -> StepReport:
    return replace(report, metrics={**report.metrics, **found.metrics()})


def _check_versions(groups: Sequence[Group], version: PolicyVersion) -> None:
    for member in (member for group in groups for member in group.trajectories):
        if member.token_ids and member.version != version:
            raise EngineError(
                f"cannot train on {member.id}: the engine sampled it from version {member.version} and the trainer is "
                f"at version {version}; the engine did not take part in the last hand-over of weights"
            )


def _some(batch: Batch) -> Int64[np.ndarray, " rows"]:
    """Rows that are trained on, spread over the batch: as many as are quickly scored, one at least if there is any."""
    rows = np.flatnonzero(rows_to_train(batch)).astype(np.int64)
    spread = rows[np.unique(np.linspace(0, len(rows) - 1, min(len(rows), _CHECKED_ROWS)).astype(np.int64))]
    tokens = np.cumsum(np.diff(batch.offsets)[spread])
    few: Int64[np.ndarray, " rows"] = spread[(tokens <= _CHECKED_TOKENS) | (np.arange(len(spread)) == 0)]
    return few
