"""The harness of the kills is tested: eleven faults, each in the real code of a real run, must be found.

Kills at random, as in a campaign, found them after so many (the last two in long campaigns only):

    free_on_wake          4  torn        missing_rank       1  torn
    overwrite_referenced  4  mixed       no_data_fsync      6  torn
    unmap_before_d2h      4  mixed       no_manifest_fsync  6  torn
    lazy_not_in_ledger    0  failed      no_dir_fsync      12  lost
    overwrite_in_place   15  torn        retention_early    -
                                         leak_refs          -

Here those that take more than a few are looked for where they are.
"""

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.crash.campaign.inspection import Finding
from tests.crash.campaign.kills import NEVER
from tests.crash.campaign.life import Death, Life
from tests.crash.campaign.planner import kills
from tests.crash.campaign.scenarios import Reference, Scenario, reference
from tests.crash.campaign.seeded import SEEDED, fail_once
from tests.crash.small_run import prepare

RUNS = 12


class Known:
    """References, each made when it is first asked for, in the folder `base`."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self._found: dict[Scenario, Reference] = {}
        prepare(base)

    def __getitem__(self, scenario: Scenario) -> Reference:
        if scenario not in self._found:
            self._found[scenario] = reference(scenario, self.base)
        return self._found[scenario]


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> Known:
    return Known(tmp_path_factory.mktemp("seeded"))


def first_finding(name: str, known: Known) -> tuple[int, list[Finding]]:
    """After how many kills, and what."""
    seeded, count = SEEDED[name], 0
    scenario, unkilled = seeded.scenario, known[seeded.scenario]
    for number in range(RUNS):
        dice = random.Random(number)
        life = Life(
            scenario=scenario,
            reference=unkilled,
            base=known.base,
            name=f"{name} {number}",
            dice=dice,
            fault=seeded.inject,
        )
        chosen = [seeded.kills[number % len(seeded.kills)]] * 2 if seeded.kills else kills(scenario, unkilled, dice, 4)
        for event in life.live(chosen):
            count += isinstance(event, Death)
            found = list(event.findings) if isinstance(event, Death) else [event]
            if found:
                return count, found
    return count, []


@pytest.mark.slow
@pytest.mark.parametrize("name", SEEDED)
def test_each_fault_is_found(known: Known, name: str, record_property: Callable[[str, object], None]) -> None:
    count, found = first_finding(name, known)
    record_property("kills", count)
    assert found and found[0].kind in SEEDED[name].found, f"{name} after {count} kills: {found}"


@pytest.mark.slow
def test_nothing_is_found_in_a_sound_program_whose_disk_is_full_for_a_moment(known: Known) -> None:
    scenario = SEEDED["leak_refs"].scenario
    life = Life(
        scenario=scenario,
        reference=known[scenario],
        base=known.base,
        name="sound",
        dice=random.Random(1),
        fault=fail_once,
    )
    assert list(life.live([NEVER])) == []
    assert not life.run.exists(), "what was sound is cleared away"
