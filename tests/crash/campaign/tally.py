"""What became of all kills, counted."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from tests.crash.campaign.inspection import Finding
from tests.crash.campaign.life import Death
from tests.crash.campaign.scenarios import Scenario

_BAD = {"torn": "torn", "lost": "acknowledged lost", "mixed": "mixed", "held": "held", "failed": "failed"}


@dataclass
class Tally:
    """`ended` runs were started again until they ended, `equal` of them as the run that was never killed."""

    kills: Counter[tuple[str, str]] = field(default_factory=Counter)
    bad: Counter[tuple[str, str]] = field(default_factory=Counter)
    starts: int = 0
    damaged: int = 0
    ended: int = 0
    equal: int = 0
    texts: list[str] = field(default_factory=list)

    def add(self, scenario: Scenario, event: Death | Finding) -> None:
        """A death, or something that was found where nobody died."""
        found, row = (event,), "started again"
        if isinstance(event, Death):
            row = event.kill.kind + (", power cut" if event.kill.power else "")
            self.kills[row, scenario.name] += 1
            found = event.findings
        for finding in found:
            self.bad[row, finding.kind] += 1
            where = event.kill.words if isinstance(event, Death) else "start"
            self.texts.append(f"{scenario.name}, after {where}: {finding.kind}: {finding.text}")

    def end(self, *, sound: bool) -> None:
        """A run came to its end, or was given up."""
        self.ended += 1
        self.equal += sound

    @property
    def total(self) -> int:
        """Kills so far."""
        return sum(self.kills.values())

    @property
    def sound(self) -> bool:
        """Whether nothing was wrong, and something was done."""
        return not self.texts and self.ended == self.equal > 0 and self.total > 0

    def to_json(self, *, seconds: float, seed: int) -> dict[str, Any]:
        """All of it, for programs."""
        kinds = Counter[str]()
        for (_, kind), count in self.bad.items():
            kinds[kind] += count
        return {
            "kills": self.total,
            "torn": kinds["torn"],
            "acknowledged_lost": kinds["lost"],
            "mixed": kinds["mixed"],
            "held": kinds["held"],
            "failed": kinds["failed"],
            "runs": self.ended,
            "resumes_equal": self.equal,
            "starts": self.starts,
            "seconds": round(seconds, 1),
            "seed": seed,
            "by_kind": {row: sum(n for (r, _), n in self.kills.items() if r == row) for row in self._rows()},
            "by_scenario": {name: self._of(name) for name in sorted({name for _, name in self.kills})},
            "findings": self.texts,
        }

    def lines(self) -> list[str]:
        """The table, for people."""
        head = ["", "kills", *_BAD.values()]
        rows = [[row, *map(str, [self._of_row(row), *(self.bad[row, kind] for kind in _BAD)])] for row in self._rows()]
        totals = [sum(int(row[column]) for row in rows) for column in range(1, len(head))]
        cells = [head, *rows, ["all", *map(str, totals)]]
        widths = [max(len(row[column]) for row in cells) for column in range(len(head))]
        table = ["  ".join(cell.ljust(width) if not i else cell.rjust(width) for i, (cell, width) in
                 enumerate(zip(row, widths, strict=True))) for row in cells]  # fmt: skip
        return [*table, f"resumes equal: {self.equal} of {self.ended}", *self.texts]

    def _rows(self) -> list[str]:
        return sorted({row for row, _ in self.kills} | {row for row, _ in self.bad})

    def _of_row(self, row: str) -> int:
        return sum(count for (its, _), count in self.kills.items() if its == row)

    def _of(self, name: str) -> int:
        return sum(count for (_, its), count in self.kills.items() if its == name)
