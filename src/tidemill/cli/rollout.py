"""`tidemill rollout`: generate and score answers, without a trainer."""

import argparse
import json

from tidemill.cli.streams import tell
from tidemill.config.load import load

__all__ = ["main"]


def main(args: argparse.Namespace) -> int:
    """Write the scored answers to `args.out` and print their numbers."""
    loaded = load(args.files, args.words, training=False)
    # torch and transformers come with it: not before the settings are known to be right.
    from tidemill.app.rollout import generate_and_score

    result = generate_and_score(loaded, out=args.out, limit=args.limit, quiet=args.json)
    if args.json:
        tell(json.dumps(result))
        return 0
    mean = f"{result['reward/mean']:.3f}" if "reward/mean" in result else "none given"
    tell(f"{result['prompts']} prompts, {result['rollout/tokens']:.0f} tokens, mean reward {mean}")
    tell(f"  best answer  {result['best']['answer']!r} to {result['best']['prompt']!r} ({result['best']['reward']})")
    tell(f"  all answers  {result['rollouts']}")
    return 0
