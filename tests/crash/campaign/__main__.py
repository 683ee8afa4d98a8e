"""`python -m tests.crash.campaign`: kill real runs a thousand times, and print what became of them.

The exit code is 0 only when nothing was torn, lost, mixed or unequal. A campaign that failed is made again by its seed,
as far as moments can be, and leaves the folder of the run that was wrong.
"""

import argparse
import json
import shutil
import sys
import tempfile
import time
from pathlib import Path

from tests.crash.campaign.campaign import Campaign, references
from tests.crash.campaign.scenarios import SCENARIOS
from tidemill.recorders.bars import Bars, NoBars


def arguments() -> argparse.Namespace:
    """Of the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.crash.campaign", description=__doc__)
    parser.add_argument("--kills", type=int, default=1000, help="how many, at least")
    parser.add_argument("--jobs", type=int, default=2, help="runs at the same time")
    parser.add_argument("--seed", type=int, default=5)
    parser.add_argument("--ranks", type=int, choices=(1, 2), help="only runs of so many ranks")
    parser.add_argument("--folder", type=Path, help="a new folder to work in, which stays; else a temporary one")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    return parser.parse_args()


def main() -> int:
    """The exit code."""
    chosen = arguments()
    began = time.monotonic()
    base = chosen.folder or Path(tempfile.mkdtemp(prefix="tidemill crash ü "))
    base.mkdir(parents=True, exist_ok=True)
    bars = Bars(sys.stderr) if sys.stderr.isatty() else NoBars(sys.stderr)
    scenarios = [scenario for scenario in SCENARIOS if chosen.ranks in (None, scenario.ranks)]
    bars.print(f"{len(scenarios)} ways to run, each once without a kill", "")
    known = references(base, scenarios, lambda name: bars.print(f"  {name}", "dim"))
    told = _Told(bars, chosen.kills)
    tally = Campaign(base, known, seed=chosen.seed, wanted=chosen.kills, told=told).run(chosen.jobs)
    bars.close()
    seconds = time.monotonic() - began
    if chosen.json:
        sys.stdout.write(json.dumps(tally.to_json(seconds=seconds, seed=chosen.seed), indent=1) + "\n")
    else:
        sys.stdout.write("\n".join([*tally.lines(), f"{seconds:.0f} s, seed {chosen.seed}"]) + "\n")
    if tally.sound and chosen.folder is None:
        shutil.rmtree(base)
    elif not tally.sound:
        sys.stderr.write(f"what was wrong is in {base}\n")
    return 0 if tally.sound else 1


class _Told:
    """A bar, or a line each fifty kills where there is none."""

    def __init__(self, bars: Bars | NoBars, wanted: int) -> None:
        self._bars, self._wanted, self._next = bars, wanted, 50

    def __call__(self, kills: int) -> None:
        self._bars.show("kills", kills, self._wanted)
        if isinstance(self._bars, NoBars) and kills >= self._next:
            self._next += 50
            self._bars.print(f"{kills} of {self._wanted} kills", "")


if __name__ == "__main__":
    raise SystemExit(main())
