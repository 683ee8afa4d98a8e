"""Which kill comes next: at random, each named point as often as the others, and early passes as often as late ones."""

import random
from collections.abc import Iterator

from tests.crash.campaign.kills import Kill
from tests.crash.campaign.scenarios import Reference, Scenario

_AT = {"point": 4, "operation": 3, "moment": 3}
_POWER, _DAMAGE, _RANK = 0.5, 0.1, 0.5


def kills(scenario: Scenario, reference: Reference, dice: random.Random, count: int) -> Iterator[Kill]:
    """`count` kills of one run. All but the first one strike early: what is left of a run that was killed is short."""
    for number in range(count):
        share = 1.0 if number == 0 else 0.5
        (at,) = dice.choices(list(_AT), list(_AT.values()))
        power, damage = dice.random() < _POWER, dice.random() < _DAMAGE
        whom = "all" if power or dice.random() < 1 / 3 else "it"
        match at:
            case "point":
                name = dice.choice(sorted(reference.points))
                nth = dice.randint(1, max(1, round(share * reference.points[name])))
                yield Kill(at=at, name=name, nth=nth, whom=whom, power=power, damage=damage)
            case "operation":
                nth = dice.randint(1, round(share * reference.operations))
                yield Kill(at=at, nth=nth, whom=whom, power=power, damage=damage)
            case _:
                if scenario.ranks > 1 and whom == "it" and dice.random() < _RANK:
                    whom = "rank"
                yield Kill(
                    at=at,
                    seconds=dice.uniform(0.02, share * reference.seconds),
                    whom=whom,
                    power=power,
                    damage=damage,
                )
