import hashlib

import pytest

from tidemill.data.fingerprint import fingerprint
from tidemill.errors import DataError


def test_equal_contents_have_equal_fingerprints(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).write_bytes(b"x" * 100_000)
    assert fingerprint(tmp_path / "a") == fingerprint(tmp_path / "b") == hashlib.sha256(b"x" * 100_000).hexdigest()


def test_a_missing_file_is_an_error_of_the_data(tmp_path):
    with pytest.raises(DataError, match="No such file"):
        fingerprint(tmp_path / "missing")
