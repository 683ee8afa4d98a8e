"""A checkpoint that was whole is broken from outside, as by a bad disk: a start has to take an older one."""

import random
from pathlib import Path

from tidemill.checkpoint.catalog import entries, problems_of


def damage_newest(folder: Path, dice: random.Random) -> tuple[int, int] | None:
    """The step that was broken and the newest whole one that is left; None, and nothing done, when there is none."""
    whole = [entry for entry in (entries(folder) if folder.exists() else []) if problems_of(entry)[0] is not None]
    if len(whole) < 2:
        return None
    newest = whole[-1]
    victim = dice.choice(sorted(path for path in newest.path.iterdir() if path.is_file()))
    match dice.randrange(3):
        case 0:
            victim.unlink()
        case 1:
            victim.write_bytes(victim.read_bytes()[: victim.stat().st_size // 2])
        case _:
            data = bytearray(victim.read_bytes())
            data[dice.randrange(len(data))] ^= 0x10
            victim.write_bytes(data)
    if problems_of(newest)[0] is not None:
        victim.unlink()  # the flipped bit was one that means nothing
    return newest.step, whole[-2].step
