"""tidemill.cli.plan: what a run takes, and whether it fits."""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.planning.test_plan import QWEN3_1_7B

Command = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(autouse=True)
def _model(folder: Path) -> None:
    (folder / "model" / "config.json").write_text(json.dumps(QWEN3_1_7B))


def test_a_run_that_fits_is_shown_by_moment_and_part(command: Command, folder: Path) -> None:
    done = command("plan", "run.toml", "--device-memory", "141GiB", "--host-memory", "1TiB")
    assert (done.returncode, done.stderr) == (0, "")
    assert "1,720.6M parameters, tied embeddings" in done.stdout
    assert "the GPU (trainer and engine): 141.0 GiB there" in done.stdout
    assert "forward and backward" in done.stdout and "trainer/activations" in done.stdout


def test_a_run_that_does_not_fit_is_shown_and_refused(command: Command, folder: Path) -> None:
    done = command("plan", "run.toml", "--device-memory", "60GiB", "--host-memory", "8GiB")
    assert done.returncode == 2
    assert "hand-over" in done.stdout
    lines = done.stderr.splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("tidemill: this run cannot fit into the 60.0 GiB of a GPU")
    assert "lower trainer.tokens_per_micro_batch (16384)" in lines[0]
    assert lines[1].startswith("tidemill: this run cannot fit into the 8.0 GiB of host memory")


def test_files_and_words_merge_as_for_a_run(command: Command, folder: Path) -> None:
    (folder / "small.toml").write_text("trainer.tokens_per_micro_batch = 1280\n")
    words = ("plan", "run.toml", "--json", "--device-memory=60GiB", "--host-memory=1TiB")
    alone, with_file, with_word = (
        json.loads(command(*words, *more).stdout)
        for more in ((), ("small.toml",), ("small.toml", "trainer.recompute=true"))
    )
    assert (alone["fits"], with_file["fits"]) == (False, True)
    assert alone["problems"] and not with_file["problems"]

    def largest(found: dict[str, list[dict[str, object]]]) -> int:
        moments = {moment["name"]: moment for moment in found["devices"][0]["moments"]}  # type: ignore[attr-defined]
        return int(moments["forward and backward"]["bytes"])

    assert largest(alone) > largest(with_file) > largest(with_word)


def test_a_program_reads_a_refusal_too(command: Command, folder: Path) -> None:
    done = command("plan", "run.toml", "--json", "--device-memory=20GiB")
    found = json.loads(done.stdout)
    assert done.returncode == 2 and found["fits"] is False
    assert "must be awake at once" in found["problems"][0]
    assert found["machine"]["device_bytes"] == 20 << 30


def test_a_model_that_nobody_knows_is_one_line(command: Command, folder: Path) -> None:
    (folder / "model" / "config.json").write_text(json.dumps(QWEN3_1_7B | {"model_type": "mamba9"}))
    done = command("plan", "run.toml")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("tidemill: cannot plan for a model of type 'mamba9'")
    assert len(done.stderr.splitlines()) == 1


def test_memory_of_a_gpu_that_the_settings_do_not_use_is_said_to_have_no_effect(command: Command, folder: Path) -> None:
    done = command("plan", "run.toml", "run.device=cpu", "--device-memory=80GiB", "--host-memory=1TiB")
    assert (done.returncode, done.stderr.count("\n")) == (0, 1)
    assert done.stderr.startswith("tidemill: --device-memory has no effect with run.device = cpu")
    assert command("plan", "run.toml", "run.device=cpu", "--host-memory=1TiB").stderr == ""


def test_planning_makes_nothing(command: Command, folder: Path) -> None:
    before = sorted(folder.rglob("*"))
    assert command("plan", "run.toml", "run.device=cpu").returncode in (0, 2)
    assert sorted(folder.rglob("*")) == before


@pytest.mark.parametrize("more", [[], ["--json"]], ids=["table", "json"])
def test_planning_is_quick_and_loads_no_gpu_stack(folder: Path, more: list[str]) -> None:
    code = (
        "import sys\nfrom tidemill.cli.main import main\n"
        f"code = main(['plan', 'run.toml', '--device-memory=141GiB', '--host-memory=1TiB', *{more}])\n"
        "heavy = ('torch', 'transformers', 'numpy', 'ray', 'safetensors', 'tokenizers')\n"
        "print([name for name in heavy if name in sys.modules])\nsys.exit(code)"
    )
    fastest = 60.0
    for _ in range(5):  # the best of five: the machine may be busy with something else
        start = time.perf_counter()
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
        fastest = min(fastest, time.perf_counter() - start)
    assert done.returncode == 0 and done.stdout.splitlines()[-1] == "[]"
    assert fastest < 0.5
