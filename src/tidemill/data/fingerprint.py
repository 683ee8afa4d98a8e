"""What a file is, whatever it is called: for the identity that a checkpoint remembers."""

import hashlib
from pathlib import Path

from tidemill.errors import DataError

__all__ = ["fingerprint"]


def fingerprint(path: Path) -> str:
    """SHA-256 of a file's bytes, 64 hexadecimal digits. Raises DataError when it cannot be read."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}; set the path of an existing file") from error
