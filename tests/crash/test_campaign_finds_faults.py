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

from tests.crash.campaign.campaign import references
from tests.crash.campaign.inspection import Finding
from tests.crash.campaign.kills import NEVER
from tests.crash.campaign.life import Death, Life
from tests.crash.campaign.planner import kills
from tests.crash.campaign.scenarios import Reference, Scenario
from tests.crash.campaign.seeded import SEEDED, fail_once

RUNS = 12


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[Scenario, Reference]]:
    base = tmp_path_factory.mktemp("seeded")
    scenarios = dict.fromkeys(seeded.scenario for seeded in SEEDED.values())
    return base, references(base, list(scenarios))


def first_finding(base: Path, name: str, known: dict[Scenario, Reference]) -> tuple[int, list[Finding]]:
    """After how many kills, and what."""
    seeded, count = SEEDED[name], 0
    scenario, reference = seeded.scenario, known[seeded.scenario]
    for number in range(RUNS):
        dice = random.Random(number)
        life = Life(
            scenario=scenario,
            reference=reference,
            base=base,
            name=f"{name} {number}",
            dice=dice,
            fault=seeded.inject,
        )
        chosen = [seeded.kills[number % len(seeded.kills)]] * 2 if seeded.kills else kills(scenario, reference, dice, 4)
        for event in life.live(chosen):
            count += isinstance(event, Death)
            found = list(event.findings) if isinstance(event, Death) else [event]
            if found:
                return count, found
    return count, []


@pytest.mark.slow
@pytest.mark.parametrize("name", SEEDED)
def test_each_fault_is_found(
    known: tuple[Path, dict[Scenario, Reference]], name: str, record_property: Callable[[str, object], None]
) -> None:
    count, found = first_finding(known[0], name, known[1])
    record_property("kills", count)
    assert found and found[0].kind in SEEDED[name].found, f"{name} after {count} kills: {found}"


@pytest.mark.slow
def test_nothing_is_found_in_a_sound_program_whose_disk_is_full_for_a_moment(
    known: tuple[Path, dict[Scenario, Reference]],
) -> None:
    scenario = SEEDED["leak_refs"].scenario
    life = Life(
        scenario=scenario,
        reference=known[1][scenario],
        base=known[0],
        name="sound",
        dice=random.Random(1),
        fault=fail_once,
    )
    assert list(life.live([NEVER])) == []
    assert not life.run.exists(), "what was sound is cleared away"
