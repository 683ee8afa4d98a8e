"""One run, killed and started again until it ends: what was wrong on the way, and whether it ends as if unkilled."""

import contextlib
import os
import random
import shutil
import signal
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.crash.campaign.damage import damage_newest
from tests.crash.campaign.disk_left import Replay
from tests.crash.campaign.disk_trace import has_begun
from tests.crash.campaign.inside import Inside, no_fault
from tests.crash.campaign.inspection import Finding, findings, findings_of_exports
from tests.crash.campaign.kills import NEVER, Kill
from tests.crash.campaign.processes import end_group, of_group, wait_for_group
from tests.crash.campaign.scenarios import LIMIT, Fault, Reference, Scenario
from tests.crash.small_run import outcome, start
from tidemill.errors import TidemillError

SOMETHING = 4
"""Of what a power cut may leave, so many possibilities at random are looked at, beside nothing and all."""


@dataclass(frozen=True)
class Death:
    """A start that was killed, and what was found after it."""

    kill: Kill
    findings: tuple[Finding, ...]


@dataclass(kw_only=True)
class Life:
    """In the folder `base`, under `name`. `fault` makes the program wrong."""

    scenario: Scenario
    reference: Reference
    base: Path
    name: str
    dice: random.Random
    fault: Fault = no_fault
    acknowledged: int = 0
    damaged: set[int] = field(default_factory=set)
    starts: int = 0

    def __post_init__(self) -> None:
        self.run = self.base / self.name
        self.log = self.base / f"{self.name}.log"
        self.run.mkdir()

    def live(self, kills: Iterable[Kill]) -> Iterator[Death | Finding]:
        """Each death as it comes, and what is wrong at the end. The folder goes when nothing was wrong."""
        sound = True
        for kill in kills:
            code, struck = self._start(kill)
            found = tuple(self._after(kill, code, struck))
            if struck:
                yield Death(kill, found)
            else:
                yield from found
            if found:
                return
            if code == 0 and not kill.power:
                break
        for finding in self._end():
            sound = False
            yield finding
        if sound:
            self._clear()

    def _start(self, kill: Kill) -> tuple[int, bool]:
        """The exit code, and whether it was killed. Nothing of it runs any more when the power is cut."""
        self.starts += 1
        traced = kill.power or kill.at == "operation"
        inside = Inside(
            run=self.run,
            notes=self.base / f"{self.name} notes {self.starts}",
            kill=kill,
            traced=traced,
            slow=self.scenario.slow,
            fault=self.fault,
        )
        process = start(self.scenario.words(self.base, self.run), self.log, inside=inside)
        group = process.pid or 0
        process.join(kill.seconds if kill.at == "moment" else LIMIT)
        struck = process.exitcode is None and kill.at == "moment" and self._strike(kill, group)
        process.join(LIMIT)
        self._stuck = process.exitcode is None
        if kill.power or self._stuck:
            end_group(group)
        elif self.dice.random() < 0.5:
            # The others of a run end when its driver does; the next start need not wait for that.
            wait_for_group(group, seconds=30.0)
        process.join()
        self.acknowledged = max(self.acknowledged, inside.acknowledged)
        self._trace, self._held = inside.notes / "trace", inside.held
        return process.exitcode or 0, struck or bool(inside.killed)

    def _strike(self, kill: Kill, group: int) -> bool:
        others = of_group(group)[1:]
        with contextlib.suppress(ProcessLookupError):
            if kill.whom == "rank":
                if not others:
                    return False
                os.kill(self.dice.choice(others), signal.SIGKILL)
            elif kill.whom == "all" or kill.power:
                os.killpg(group, signal.SIGKILL)
            else:
                os.kill(group, signal.SIGKILL)
            return True
        return False

    def _after(self, kill: Kill, code: int, struck: bool) -> Iterator[Finding]:
        # Who loses a worker says so and ends with 1.
        allowed = {0, 1, -signal.SIGKILL} if struck else {0}
        if self._stuck or code not in allowed:
            yield self._failed("does not end" if self._stuck else f"ended with {code}")
            return
        if self._held:
            yield Finding("held", f"a save began while pages were still held for another, at {self._held}")
        yield from self._cut_power() if kill.power and has_begun(self._trace) else self._look()
        # A run that has ended looks at its checkpoints no more.
        if kill.damage and not self._has_ended() and (broken := damage_newest(self.run / "checkpoints", self.dice)):
            step, self.acknowledged = broken
            self.damaged.add(step)

    def _look(self) -> list[Finding]:
        found = findings(
            self.run / "checkpoints",
            acknowledged=self.acknowledged,
            damaged=self.damaged,
            versions=self.reference.versions,
        )
        return [*found, *findings_of_exports(self.run / "export", self.reference.exports)]

    def _cut_power(self) -> Iterator[Finding]:
        """The run folder becomes what the disk may have kept of it; several possibilities are looked at."""
        replay, whole = Replay(self._trace), self.run.with_name(f"{self.name} whole")
        if unseen := replay.unseen(self.run):
            yield self._failed(f"changes were made that nobody saw: {sorted(unseen)[:3]}")
        self.run.rename(whole)
        adversaries = [_nothing, _everything, *[self.dice.randrange] * SOMETHING]
        self.dice.shuffle(adversaries)
        for number, choose in enumerate(adversaries):
            if number:
                shutil.rmtree(self.run)
            replay.leave(self.run, choose)
            if found := self._look():
                yield from found
                return
        shutil.rmtree(whole)

    def _has_ended(self) -> bool:
        summary = self.run / "summary.json"
        return summary.exists() and '"finished": true' in summary.read_text()

    def _end(self) -> Iterator[Finding]:
        code, _ = self._start(NEVER)
        found = list(self._after(NEVER, code, False))
        yield from found
        if found:
            return
        try:
            equal = outcome(self.run) == self.reference.outcome
        except (OSError, ValueError, KeyError, TidemillError) as error:
            yield Finding("unequal", f"{self.name} has no outcome: {error!r}")
            return
        if not equal:
            yield Finding("unequal", f"{self.name} ended in another state than a run that was never killed")

    def _failed(self, text: str) -> Finding:
        return Finding("failed", f"start {self.starts} of {self.name} {text}: {self.log.read_text()[-1500:]}")

    def _clear(self) -> None:
        for path in self.base.glob(f"{self.name}*"):
            if path == self.run or path.name.startswith((f"{self.name} ", f"{self.name}.")):
                shutil.rmtree(path) if path.is_dir() else path.unlink()


def _nothing(options: int) -> int:
    return 0


def _everything(options: int) -> int:
    return options - 1
