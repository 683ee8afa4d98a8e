"""Numbers of scored groups, finite whatever the groups hold."""

import math
from collections import defaultdict
from collections.abc import Sequence

from tidemill.contracts.sample import Group, ScoreStatus, StopReason, Trajectory

__all__ = ["rollout_metrics"]

_LARGEST = 1e300  # sums of what is larger may overflow


def rollout_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """`reward/*` over answers that have a reward, `rollout/*` over all.

    `reward/mean` and `reward/std` (of the population) are left out when no answer has a reward: zero would look like
    one. `reward/scored`, `reward/abstained`, `reward/failed`, `rollout/truncated` and `rollout/finished` are fractions
    of all answers. Which groups teach something is the algorithm's to say (`Batch.metrics`).
    """
    members = [member for group in groups for member in group.trajectories]
    total = max(len(members), 1)
    metrics = {
        f"reward/{status.value}": sum(_status(member) is status for member in members) / total for status in ScoreStatus
    }
    rewards = [member.reward for member in members if member.reward is not None]
    if rewards:
        metrics["reward/mean"] = _mean(rewards)
        metrics["reward/std"] = _std(rewards)
    metrics.update(_parts(members))
    lengths = [len(member.token_ids) for member in members]
    metrics["rollout/tokens"] = float(sum(lengths))
    metrics["rollout/tokens_mean"] = sum(lengths) / total
    metrics["rollout/tokens_max"] = float(max(lengths, default=0))
    metrics["rollout/truncated"] = sum(member.stop_reason is StopReason.LENGTH for member in members) / total
    ended = (StopReason.EOS, StopReason.STOP)
    metrics["rollout/finished"] = sum(member.stop_reason in ended for member in members) / total
    metrics["rollout/groups"] = float(len(groups))
    return metrics


def _status(member: Trajectory) -> ScoreStatus | None:
    return member.score.status if member.score is not None else None


def _parts(members: Sequence[Trajectory]) -> dict[str, float]:
    """Mean of each named part over the answers that have it; a part may not hide one of our own names."""
    values: dict[str, list[float]] = defaultdict(list)
    for member in members:
        for name, value in (member.score.parts if member.score is not None else {}).items():
            values[name].append(value)
    taken = {"mean", "std", *(status.value for status in ScoreStatus)}
    return {
        f"reward/{name}_part" if name in taken else f"reward/{name}": _mean(found) for name, found in values.items()
    }


def _mean(values: Sequence[float]) -> float:
    return math.fsum(_bounded(value) / len(values) for value in values)


def _std(values: Sequence[float]) -> float:
    """Scaled by the largest deviation, whose square may be no number."""
    middle = _mean(values)
    deviations = [abs(_bounded(value) - middle) for value in values]
    scale = max(deviations)
    if scale == 0:
        return 0.0
    return scale * math.sqrt(math.fsum((deviation / scale) ** 2 for deviation in deviations) / len(values))


def _bounded(value: float) -> float:
    return min(max(value, -_LARGEST), _LARGEST)
