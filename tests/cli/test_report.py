import argparse
import json
from pathlib import Path

import pytest

from tidemill.cli.report import main
from tidemill.errors import ConfigError


def test_it_prints_where_the_page_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argparse.Namespace(run=str(tmp_path), json=False)) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'report.html'}\n"
    assert (tmp_path / "report.html").read_text().startswith("<!doctype html>")


def test_it_prints_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argparse.Namespace(run=tmp_path, json=True)) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == {"report": str(tmp_path / "report.html"), "bytes": (tmp_path / "report.html").stat().st_size}


def test_a_run_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such folder"):
        main(argparse.Namespace(run=tmp_path / "absent", json=False))


def test_a_page_that_cannot_be_written_is_a_plain_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path, *args: object, **kwargs: object) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "write_text", refuse)
    with pytest.raises(ConfigError, match="Permission denied"):
        main(argparse.Namespace(run=tmp_path, json=False))
