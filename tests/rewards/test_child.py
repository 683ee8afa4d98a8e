import subprocess
import sys


def test_the_process_loads_within_a_fraction_of_a_second_and_nothing_heavy():
    script = (
        "import sys, tidemill.rewards.child; print(sorted({'torch', 'numpy', 'pydantic', 'psutil'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=20, check=True)
    assert result.stdout.strip() == "[]"


def test_a_process_without_its_parent_ends_at_once():
    command = [sys.executable, "-m", "tidemill.rewards.child", "0", "1", "0", "1"]
    result = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=20, check=False)
    assert result.returncode != 0
