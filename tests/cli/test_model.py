import json
from pathlib import Path

import tidemill.cli.model
from tidemill.cli.main import main
from tidemill.testing.tiny import make_tiny_model


def test_a_model_is_imported_and_described_in_a_line(tmp_path: Path, capsys) -> None:
    source = make_tiny_model(tmp_path / "source", hidden=64, heads=2, kv_heads=1)
    capsys.readouterr()
    assert main(["model", "import", str(source), "--out", str(tmp_path / "out")]) == 0
    said = capsys.readouterr()
    assert "Qwen3ForCausalLM, 0.1M parameters, float32, tied embeddings, a chat template" in said.out
    assert said.err.startswith(f"reading {source}")
    assert (tmp_path / "out" / "model.safetensors").exists()


def test_json_is_one_object(tmp_path: Path, capsys) -> None:
    source = make_tiny_model(tmp_path / "source", hidden=64, heads=2, kv_heads=1)
    assert main(["model", "import", "--json", str(source), "--out", str(tmp_path / "out")]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["folder"] == str(tmp_path / "out")
    assert answer["parameters"] > 0
    assert answer["notices"] == []


def test_what_cannot_be_imported_is_exit_code_two_and_one_line(tmp_path: Path, capsys) -> None:
    assert main(["model", "import", str(tmp_path / "gone"), "--out", str(tmp_path / "out")]) == 2
    assert "nothing there" in capsys.readouterr().err


def test_the_verb_alone_loads_no_torch() -> None:
    assert "torch" not in vars(tidemill.cli.model)
