"""Every answer of a step in one JSONL file, whole and exact, to study and to replay.

One line a trajectory, prompt included, in the order of the groups. Numbers are written so that they are read back
equal, bit for bit; text is written in ASCII escapes, so that no text, half a surrogate pair included, can break a line
or an encoding. A file appears whole or not at all, and a step that is run again replaces its file. Every
line says from what distribution was sampled: log-probs mean nothing without it.
"""

import contextlib
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from tidemill.contracts.engine import Sampling
from tidemill.contracts.sample import Group, Prompt, Score, ScoreStatus, StopReason, Trajectory
from tidemill.contracts.state import PolicyVersion
from tidemill.errors import DataError, TidemillError
from tidemill.faults import point

__all__ = ["DumpedStep", "RolloutDump", "distribution", "dumped_steps", "read_dump"]

_FORMAT = 2
_NAME = re.compile(r"step-(\d{8,})\.jsonl")
_NON_FINITE = {"nan", "inf", "-inf"}
_NO_ADVANTAGES: Mapping[str, float] = {}
_NO_LOGPROBS: Mapping[str, Sequence[float]] = {}


@dataclass(frozen=True, kw_only=True)
class DumpedStep:
    """What was written of one step. `advantages` by trajectory id, for those that had one.

    `sampling` is what `distribution` says of it; empty when no answer was written.
    """

    step: int
    groups: tuple[Group, ...]
    advantages: Mapping[str, float]
    sampling: Mapping[str, float]


def distribution(sampling: Sampling) -> dict[str, float]:
    """What of it determines the log-prob of a token, by the names of `rollout.sampling`."""
    return {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k}


class RolloutDump:
    """Writes `step-00000012.jsonl` files into a folder, which is made when the first is written.

    `sampling` is how the answers were sampled; `otherwise` is what to do when they cannot be written, for the message.
    """

    def __init__(self, folder: Path, *, sampling: Sampling, otherwise: str) -> None:
        self.folder = Path(folder)
        self._sampling = distribution(sampling)
        self._otherwise = otherwise

    def write(
        self,
        step: int,
        groups: Sequence[Group],
        advantages: Mapping[str, float] = _NO_ADVANTAGES,
        trainer_logprobs: Mapping[str, Sequence[float]] = _NO_LOGPROBS,
    ) -> Path:
        """Write a step's groups; returns the file, which is the caller's to fsync. Writing it again replaces it.

        By trajectory id: advantages, and the trainer's log-probs of the answer's tokens, which are for people to study.
        Raises TidemillError when it cannot be written: nothing is left behind then.
        """
        members = [member for group in groups for member in group.trajectories]
        for member in members:
            self._check_that_all_is_kept(member)
        common = {"format": _FORMAT, "step": step, "sampling": self._sampling}
        lines = [
            json.dumps({**common, **_to_json(member, advantages, trainer_logprobs)}, ensure_ascii=True, allow_nan=False)
            for member in members
        ]
        path = self.folder / f"step-{step:08d}.jsonl"
        temporary = path.with_suffix(".tmp")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            temporary.write_text("".join(f"{line}\n" for line in lines), encoding="ascii")
            point("rollout.dump.write")
            temporary.replace(path)
        except OSError as error:
            with contextlib.suppress(OSError):  # the first error is the one to tell
                temporary.unlink()
            raise TidemillError(
                f"cannot write rollouts of step {step} to {path}: {error.strerror}; free the disk or {self._otherwise}"
            ) from error
        return path

    def _check_that_all_is_kept(self, member: Trajectory) -> None:
        if member.routed_experts is not None or member.multimodal is not None:
            raise TidemillError(
                f"cannot dump {member.id}: it carries routed experts or multimodal inputs, which dumps do not keep; "
                f"{self._otherwise}"
            )


def dumped_steps(folder: Path) -> list[Path]:
    """The files of a dump, by step. Raises DataError when there is none."""
    found = {int(match[1]): path for path in folder.glob("*.jsonl") if (match := _NAME.fullmatch(path.name))}
    if not found:
        raise DataError(
            f"cannot replay {folder}: it holds no step-*.jsonl; set rollout.replay to the rollouts folder of a run "
            "made with rollout.dump = true"
        )
    return [found[step] for step in sorted(found)]


def read_dump(path: Path) -> DumpedStep:
    """What `RolloutDump` wrote, equal to what it was given. Raises DataError, with the line, for anything else."""
    step = -1
    members: list[Trajectory] = []
    advantages: dict[str, float] = {}
    sampling: dict[str, float] = {}
    for number, line in _lines(path):
        try:
            value = json.loads(line)
            step = _step(value)
            member = _from_json(value)
            sampling = {name: float(number) for name, number in value["sampling"].items()}
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"cannot read rollouts at {path}:{number}: {error}; dump them again") from error
        members.append(member)
        if value["advantage"] is not None:
            advantages[member.id] = _number(value["advantage"])
    groups = tuple(
        Group(prompt=same[0].prompt, trajectories=tuple(same))
        for _, group in groupby(members, key=lambda member: member.prompt.key)
        if (same := list(group))
    )
    return DumpedStep(step=step, groups=groups, advantages=advantages, sampling=sampling)


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"cannot read rollouts from {path}: {error.strerror}; set an existing folder") from error
    return ((number, line) for number, line in enumerate(content.split(b"\n"), start=1) if line)


def _step(value: Any) -> int:
    if value["format"] != _FORMAT:
        raise ValueError(f"format {value['format']!r} is not {_FORMAT}")
    return int(value["step"])


def _to_json(
    member: Trajectory, advantages: Mapping[str, float], trainer_logprobs: Mapping[str, Sequence[float]]
) -> dict[str, Any]:
    known = trainer_logprobs.get(member.id)
    return {
        "id": member.id,
        "prompt": {
            "id": member.prompt.id,
            "key": member.prompt.key,
            "text": member.prompt.text,
            "label": member.prompt.label,
            "extra": dict(member.prompt.extra),
            "token_ids": list(member.prompt.token_ids),
        },
        "sample": member.sample,
        "text": member.text,
        "stop_reason": member.stop_reason.value,
        "version": {"attempt": member.version.attempt, "step": member.version.step},
        "score": _score_to_json(member.score),
        "advantage": _finite_or_word(advantages[member.id]) if member.id in advantages else None,
        "token_ids": list(member.token_ids),
        "logprobs": [_finite_or_word(value) for value in member.logprobs],
        "trainer_logprobs": None if known is None else [_finite_or_word(value) for value in known],
        "loss_mask": list(member.loss_mask),
    }


def _score_to_json(score: Score | None) -> dict[str, Any] | None:
    if score is None:
        return None
    return {"value": score.value, "status": score.status.value, "reason": score.reason, "parts": dict(score.parts)}


def _finite_or_word(value: float) -> float | str:
    """JSON has no NaN and no infinity; Python's shortest form of any other number is read back as that number."""
    number = float(value)
    return number if math.isfinite(number) else str(number)


def _number(value: Any) -> float:
    if isinstance(value, str) and value not in _NON_FINITE:
        raise ValueError(f"{value!r} is not a number")
    return float(value)


def _from_json(value: Mapping[str, Any]) -> Trajectory:
    prompt, version = value["prompt"], value["version"]
    return Trajectory(
        prompt=Prompt(
            id=prompt["id"],
            key=prompt["key"],
            token_ids=tuple(prompt["token_ids"]),
            text=prompt["text"],
            label=prompt["label"],
            extra=prompt["extra"],
        ),
        sample=value["sample"],
        token_ids=tuple(value["token_ids"]),
        logprobs=tuple(map(_number, value["logprobs"])),
        loss_mask=tuple(value["loss_mask"]),
        version=PolicyVersion(version["attempt"], version["step"]),
        stop_reason=StopReason(value["stop_reason"]),
        text=value["text"],
        score=_score_from_json(value["score"]),
    )


def _score_from_json(value: Mapping[str, Any] | None) -> Score | None:
    if value is None:
        return None
    return Score(
        value=value["value"], status=ScoreStatus(value["status"]), reason=value["reason"], parts=value["parts"]
    )
