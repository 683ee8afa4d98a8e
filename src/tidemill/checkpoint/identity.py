"""What a checkpoint is bound to (model, tokenizer, data, algorithm, seed, ...), compared with the run that finds it."""

from collections.abc import Collection, Mapping
from pathlib import Path

from tidemill.checkpoint.catalog import entries
from tidemill.checkpoint.manifest import MANIFEST, Manifest, NewerFormatError
from tidemill.errors import CheckpointError, CheckpointRefused

__all__ = ["check_identity", "check_newest"]

_NOTHING = "not known"


def check_identity(path: Path, saved: Mapping[str, str], mine: Mapping[str, str], *, accept: Collection[str]) -> None:
    """Raises CheckpointError when the checkpoint at `path` is bound to anything that is neither mine nor accepted."""
    for name in sorted({*saved, *mine} - set(accept)):
        was, now = saved.get(name, _NOTHING), mine.get(name, _NOTHING)
        if was != now:
            raise CheckpointRefused(
                f"cannot resume from {path}: its {name} is {was}, this run's is {now}; go back to the former, start "
                f'another run.dir, or accept the change with checkpoint.accept = ["{name}"]'
            )


def check_newest(folder: Path, mine: Mapping[str, str], *, accept: Collection[str]) -> None:
    """As `check_identity`, of the newest checkpoint in `folder` that says what it is; none of them has to be whole."""
    for entry in reversed(entries(folder)):
        try:
            saved = Manifest.read(entry.path / MANIFEST).identity
        except NewerFormatError:
            raise
        except (CheckpointError, OSError):
            continue  # a resume would judge it; here an older one of the same run says as much
        check_identity(entry.path, saved, mine, accept=accept)
        return
