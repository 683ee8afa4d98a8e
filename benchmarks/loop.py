"""What the loop itself costs: the share of a step that is neither generation, training, reward nor evaluation.

Reads a run folder, so any run can be looked at. `overhead` is over all steps of the run, `overhead_rl` and its parts
over those with a rollout; steps with an evaluation are left out.

    python -m benchmarks.loop runs/quickstart [--json FILE]
"""

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

WORK = ("time/generate", "time/train", "time/reward")
PARTS = ("time/sleep", "time/wake_up", "time/update_weights", "time/save_stall", "time/other")


def timings(run: Path) -> list[dict[str, Any]]:
    """Timing lines of steps without an evaluation."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == "timing" and "time/evaluate" not in line]


def overhead(steps: list[dict[str, Any]]) -> float:
    """Seconds outside of work, as a part of all seconds."""
    total = sum(step["time/step"] for step in steps)
    return 1 - sum(step.get(name, 0.0) for step in steps for name in WORK) / total


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    everything = timings(arguments.run)
    steps = [step for step in everything if "time/generate" in step]
    if not steps:
        print(f"{arguments.run} has no reinforcement step to look at", file=sys.stderr)
        return 1
    total = sum(step["time/step"] for step in steps)
    values = {"overhead": overhead(everything), "overhead_rl": overhead(steps)}
    values |= {name.removeprefix("time/"): sum(step.get(name, 0.0) for step in steps) / total for name in PARTS}
    middle = statistics.median(step["time/step"] for step in steps)
    lines = [
        {"benchmark": "loop", "arm": "tidemill", "case": arguments.run.name, "metric": name, "value": round(value, 4),
         "unit": "of a step", "cycle": "all", "verified": True}
        for name, value in values.items()
    ]  # fmt: skip
    for line in lines:
        print(json.dumps(line))
    if arguments.json:
        arguments.json.write_text("".join(json.dumps(line) + "\n" for line in lines))
    print(f"\n{len(steps)} steps of {middle * 1e3:.0f} ms (median)")
    for name, value in values.items():
        print(f"{name:>16} {value:7.2%}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
