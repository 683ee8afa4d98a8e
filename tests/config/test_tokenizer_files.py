"""tidemill.config.tokenizer_files: what counts as a tokenizer."""

from pathlib import Path

import pytest

from tidemill.config.tokenizer_files import TOKENIZER_KINDS, holds_a_tokenizer, tokenizer_kinds_in_words


@pytest.mark.parametrize("kind", TOKENIZER_KINDS)
def test_a_kind_counts_when_all_of_its_files_are_there(tmp_path: Path, kind: tuple[str, ...]) -> None:
    (tmp_path / "tokenizer_config.json").write_text("{}")
    for name in kind:
        assert not holds_a_tokenizer(tmp_path)
        (tmp_path / name).write_text("")
    assert holds_a_tokenizer(tmp_path)


def test_what_cannot_be_looked_at_holds_none(tmp_path: Path) -> None:
    assert not holds_a_tokenizer(tmp_path / "missing")
    assert not holds_a_tokenizer(tmp_path / ("x" * 5000))


def test_every_file_is_named_in_the_words() -> None:
    assert all(name in tokenizer_kinds_in_words() for kind in TOKENIZER_KINDS for name in kind)
