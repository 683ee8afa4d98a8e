import json
from pathlib import Path

from tidemill.recorders.lines import cut_lines, heads, parse


def test_a_line_is_read_only_when_it_is_whole_and_an_object() -> None:
    assert parse(b'{"kind":"a","step":1}\n') == {"kind": "a", "step": 1}
    assert parse(b'{"kind":"a","step":1}') is None
    assert parse(b'{"kind":"a","st\n') is None
    assert parse(b"[1, 2]\n") is None
    assert parse(b"\xff\xfe\n") is None
    assert parse(b"[" * 100_000 + b"\n") is None


def test_a_bare_nan_of_another_writer_is_null() -> None:
    assert parse(b'{"step":1,"x":NaN,"y":-Infinity}\n') == {"step": 1, "x": None, "y": None}


def test_heads_are_those_that_parsing_finds(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    good = [{"kind": "metrics", "step": i, "reward/mean": 0.5} for i in range(5)] + [{"kind": "eval", "step": 7}]
    path.write_bytes(
        b"".join(json.dumps(line, separators=(",", ":")).encode() + b"\n" for line in good) + b'{"kind":"m'
    )
    assert [(kind, step) for kind, step, _ in heads(path)] == [(line["kind"], line["step"]) for line in good]
    assert list(heads(tmp_path / "absent")) == []


def test_cutting_keeps_what_stays_and_drops_torn_and_foreign_lines(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"step":1}\nrubbish\n{"step":2}\n{"step":3}\n{"step":"4"}\n{"step":1,"to')
    cut_lines(path, lambda line: line["step"] < 3)
    assert path.read_bytes() == b'{"step":1}\n{"step":2}\n'
    assert [p.name for p in tmp_path.iterdir()] == ["x.jsonl"]


def test_a_file_from_which_nothing_goes_is_not_touched(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"step":1}\n')
    before = path.stat().st_ino
    cut_lines(path, lambda line: True)
    assert path.stat().st_ino == before
    assert [p.name for p in tmp_path.iterdir()] == ["x.jsonl"]


def test_a_file_that_is_not_there_is_nothing_to_cut(tmp_path: Path) -> None:
    cut_lines(tmp_path / "absent", lambda line: True)
    assert not list(tmp_path.iterdir())
