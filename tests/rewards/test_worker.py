import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tidemill.rewards.worker import Worker, WorkerDiedError, WorkerTimeoutError, without_secrets

OURS = Path(__file__).with_name("reward_functions.py")
FIELDS = {
    "id": "a",
    "text": "x",
    "prompt": "",
    "prompt_id": "",
    "sample": 0,
    "label": None,
    "extra": {},
    "token_ids": [],
    "stop_reason": "eos",
}


@pytest.fixture
def worker():
    made = Worker()
    yield made
    made.close()


def load(worker, use, **keywords):
    return worker.call({"load": use, "keywords": keywords, "memory": 1 << 28, "sys_path": sys.path}, 20)


def test_names_that_look_like_secrets_are_left_out():
    names = [
        "HF_TOKEN",
        "WANDB_API_KEY",
        "AWS_SECRET_ACCESS_KEY",
        "db_password",
        "OPENAI_APIKEY",
        "MY_CREDENTIALS",
        "KEY",
        "GITHUB_TOKEN_FILE",
        "PGPASSWORD",
        "MYSQL_PWD",
        "mysqlpwd",
        "SMTP_PASS",
        "SSH_PASSPHRASE",
        "GITHUB_PAT",
        "_AUTH",
        "BASIC_auth",
        "AWSCREDENTIALS",
        "GITHUBTOKEN",
        "OPENAIAPIKEY",
    ]
    kept = ["PATH", "PWD", "OLDPWD", "TOKENIZERS_PARALLELISM", "KEYBOARD", "MONKEY", "HOME", "PYTHONPATH"]
    assert list(without_secrets(dict.fromkeys(names + kept, "x"))) == kept


def test_a_request_larger_than_the_pipe_passes(worker):
    load(worker, f"{OURS}:processes")
    reply = worker.call({"answers": [{**FIELDS, "text": "x" * 5_000_000}]}, 20)
    assert reply["entries"][0]["value"] == 1.0


def test_a_deadline_that_passes_is_an_error_and_close_ends_the_process(worker):
    load(worker, f"{OURS}:sleeps_on_each", seconds=60)
    begun = time.monotonic()
    with pytest.raises(WorkerTimeoutError):
        worker.call({"answers": [FIELDS]}, 0.2)
    assert time.monotonic() - begun < 2
    worker.close()
    assert not worker.alive()
    assert not psutil.pid_exists(worker.pid)


def test_a_dead_process_is_noticed_before_and_after_it_is_asked(worker):
    worker.kill()
    deadline = time.monotonic() + 5
    while worker.alive() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not worker.alive()
    with pytest.raises(WorkerDiedError, match="ended by SIGKILL"):
        worker.call({"answers": []}, 5)


def test_closing_twice_does_no_harm(worker):
    worker.close()
    worker.close()


@pytest.mark.parametrize("failing", ["Popen", "pipe"])
def test_a_process_that_cannot_be_started_leaves_no_descriptor_open(failing, monkeypatch):
    made = []

    def pipe(real=os.pipe):
        if failing == "pipe" and len(made) == 2:
            raise OSError("no more descriptors")
        made.append(real())
        return made[-1]

    def refuse(*args, **kwargs):
        raise OSError("no more processes")

    monkeypatch.setattr(os, "pipe", pipe)
    if failing == "Popen":
        monkeypatch.setattr(subprocess, "Popen", refuse)
    with pytest.raises(OSError, match="no more"):
        Worker()
    assert len(made) >= 2
    for fd in (end for ends in made for end in ends):
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)
