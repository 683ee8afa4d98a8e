"""`tidemill plan`: bytes by part and moment, on each device and in host memory, before anything is allocated."""

import argparse
import json
import sys

from tidemill.cli.streams import say, tell, writing
from tidemill.config.load import load
from tidemill.errors import ConfigError
from tidemill.planning.machine import this_machine
from tidemill.planning.plan import plan_of
from tidemill.planning.verdict import problems

__all__ = ["main"]


def main(arguments: argparse.Namespace) -> int:
    """0 when the run fits, or nobody knows how much there is; 2 when it does not, with what to change."""
    config = load(arguments.files, arguments.words).config
    machine = this_machine(
        device=config.run.device, device_bytes=arguments.device_memory, host_bytes=arguments.host_memory
    )
    if arguments.device_memory is not None and machine.device == "cpu":
        say("tidemill: --device-memory has no effect with run.device = cpu: this plan has no GPU", sys.stderr)
    plan = plan_of(config, machine)
    found = problems(plan, config)
    if arguments.json:
        tell(json.dumps({"fits": not found, "problems": found, **plan.to_json()}, indent=1))
        return ConfigError.exit_code if found else 0
    if sys.stdout is not None:
        # rich takes a tenth of a second to load, which --json need not wait for.
        from tidemill.planning.table import show

        with writing(sys.stdout):
            show(plan, sys.stdout)
    if found:
        say("\n".join(f"tidemill: this run {problem}" for problem in found), sys.stderr)
    return ConfigError.exit_code if found else 0
