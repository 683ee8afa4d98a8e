"""Many lives, several at a time, until so many kills were survived."""

import itertools
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.crash.campaign.life import Death, Life
from tests.crash.campaign.planner import kills
from tests.crash.campaign.scenarios import Reference, Scenario, reference
from tests.crash.campaign.tally import Tally
from tests.crash.small_run import prepare

MOST_KILLS_OF_A_RUN = 6


def references(
    base: Path, scenarios: Sequence[Scenario], told: Callable[[str], object] = lambda text: None
) -> dict[Scenario, Reference]:
    """What each comes to when nobody kills it, in the folder `base`, where data and a model are made first."""
    prepare(base)
    found = {}
    for scenario in scenarios:
        told(scenario.name)
        found[scenario] = reference(scenario, base)
    return found


class Campaign:
    """Kills runs of `known` in `base`. Any that is not sound ends it, and what is left of that run stays there."""

    def __init__(
        self,
        base: Path,
        known: Mapping[Scenario, Reference],
        *,
        seed: int,
        wanted: int,
        told: Callable[[int], object] = lambda kills: None,
        seconds: float = float("inf"),
    ) -> None:
        """`told` hears the number of kills, now and then. After `seconds` no other run is begun."""
        self._base, self._known, self._seed, self._wanted = base, known, seed, wanted
        self._told, self._ends = told, time.monotonic() + seconds
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._names = _turns(known)
        self.tally = Tally()

    def run(self, jobs: int) -> Tally:
        """The tally of all of it."""
        with ThreadPoolExecutor(jobs) as pool:
            for job in [pool.submit(self._work) for _ in range(jobs)]:
                job.result()
        return self.tally

    def _work(self) -> None:
        while True:
            with self._lock:
                if self.tally.total >= self._wanted or self.tally.texts or time.monotonic() > self._ends:
                    return
                number, scenario = next(self._numbers), next(self._names)
            self._live(number, scenario)

    def _live(self, number: int, scenario: Scenario) -> None:
        dice = random.Random(self._seed * 1_000_003 + number)
        known = self._known[scenario]
        life = Life(scenario=scenario, reference=known, base=self._base, name=f"life {number}", dice=dice)
        sound = True
        for event in life.live(kills(scenario, known, dice, dice.randint(1, MOST_KILLS_OF_A_RUN))):
            with self._lock:
                self.tally.add(scenario, event)
                sound = isinstance(event, Death) and not event.findings and sound
                self._told(self.tally.total)
        with self._lock:
            self.tally.starts += life.starts
            self.tally.end(sound=sound)


def _turns(known: Mapping[Scenario, Reference]) -> "itertools.cycle[Scenario]":
    """One rank twice as often as several, which take five times as long."""
    one = [scenario for scenario in known if scenario.ranks == 1]
    return itertools.cycle([*one, *one, *(scenario for scenario in known if scenario.ranks > 1)])
