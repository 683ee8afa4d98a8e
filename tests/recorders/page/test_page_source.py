from pathlib import Path

from tidemill.recorders.page.source import number_of, read_json, read_numbers, select_lines


def test_only_finite_numbers_are_numbers() -> None:
    assert number_of(2) == 2.0
    for value in (None, True, "1", float("inf"), float("nan"), 10**400, [1]):
        assert number_of(value) is None


def test_a_file_that_is_no_object_is_empty(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    assert read_json(path) == {}
    for content in ("", "[1]", '{"a": 1', "[" * 100_000, "\ufffd"):
        path.write_text(content)
        assert read_json(path) == {}
    path.write_text('{"a": NaN}')
    assert read_json(path) == {"a": None}


def test_a_run_of_very_many_steps_is_thinned_but_not_its_evaluations(tmp_path: Path) -> None:
    with (tmp_path / "metrics.jsonl").open("w") as file:
        for step in range(9000):
            file.write(f'{{"kind":"metrics","step":{step},"reward/mean":1.0}}\n')
        file.write('{"kind":"eval","step":4001,"eval/reward":0.5}\n')
    numbers = read_numbers(tmp_path)
    assert numbers.steps == 9000
    assert len(numbers.metrics) == 3001 and numbers.metrics[-1]["step"] == 8999
    assert numbers.evaluations[0]["step"] == 4001


def test_lines_that_nobody_wants_are_not_parsed(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"kind":"a","step":1,broken\n{"kind":"b","step":1}\n{"kind":"b","step":2}\n')
    assert list(select_lines(path, {"b": frozenset({2}), "a": frozenset({9})})) == [{"kind": "b", "step": 2}]
    assert len(list(select_lines(path, {"a": None, "b": None}))) == 2
