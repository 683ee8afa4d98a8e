"""Reward functions for the tests of this folder; run in guarded child processes only."""

import os
import signal
import subprocess
import sys
import time
from fractions import Fraction
from pathlib import Path


def odd(answers, *, expression):
    """Whatever the expression gives."""
    names = {"answers": answers, "Fraction": Fraction}
    if "numpy" in expression:
        import numpy

        names["numpy"] = numpy
    if "torch" in expression:
        import torch

        names["torch"] = torch
    return eval(expression, names)


def by_id(answers):
    return {answer.id: float(len(answer)) for answer in reversed(answers)}


def describes(answers):
    return [
        {
            "score": 1.0,
            "reason": "|".join(
                [
                    answer.id,
                    answer.prompt,
                    answer.prompt_id,
                    str(answer.sample),
                    repr(answer.label),
                    repr(dict(answer.extra)),
                    repr(answer.token_ids),
                    answer.stop_reason,
                    answer.text,
                    str(answer),
                    type(answer.text).__name__,
                ]
            ),
        }
        for answer in answers
    ]


def tries_to_change_an_answer(answers):
    answers[0].label = "mine"
    return [1.0] * len(answers)


def sorts_its_input(answers):
    answers.sort()
    return [float(len(answer)) for answer in answers]


def empties_its_input(answers):
    scores = [1.0] * len(answers)
    answers.clear()
    return scores


def environment(answers, *, name):
    return [{"score": 1.0, "reason": os.environ.get(name, "not there")} for _ in answers]


def modules(answers):
    heavy = {"torch", "numpy", "transformers"} & set(sys.modules)
    return [{"score": 1.0, "reason": ",".join(sorted(heavy))} for _ in answers]


def kills_itself(answers):
    if "die" in answers:
        os.kill(os.getpid(), signal.SIGSEGV)
    return [1.0] * len(answers)


def folder(answers):
    return [{"score": 1.0, "reason": str(Path.cwd())} for _ in answers]


def changes_folder_after_telling(answers):
    told = folder(answers)
    os.chdir(os.path.sep)
    return told


def leaves_a_daemon(answers):
    """In a session of its own, so that killing the group does not reach it."""
    script = "import time; time.sleep(120)"
    daemon = subprocess.Popen([sys.executable, "-c", script], start_new_session=True)
    return [float(daemon.pid)] * len(answers)


def leaves_a_child(answers):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(120)"])
    return [float(child.pid)] * len(answers)


def hangs_with_a_child(answers, *, path):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(120)"])
    Path(path).write_text(f"{os.getpid()} {child.pid}")
    time.sleep(120)


def reads_input(answers):
    return [float(len(sys.stdin.read())) for _ in answers]


def sleeps_on_each(answers, *, seconds):
    time.sleep(seconds * len(answers))
    return [1.0] * len(answers)


def processes(answers):
    return [{"score": 1.0, "reason": f"{os.getpid()} {len(answers)}"} for _ in answers]


def returns_much(answers):
    return [{"score": 1.0, "reason": "x" * (80 << 20)} for _ in answers]


class Scorer:
    """Functions may be named through a class."""

    @staticmethod
    def score(answers):
        return [3.0] * len(answers)


not_a_function = 3
