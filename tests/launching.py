"""Launches from Python on the CPU: functions to run on ranks, and a new interpreter."""

import functools
import os
import subprocess
import sys
from pathlib import Path

import meshrun

run = functools.partial(meshrun.launch, device="cpu")


def rank() -> int:
    return int(os.environ["RANK"])


def add(left: int, right: int) -> int:
    return left + right + rank()


def python(*words: str | Path, cwd: Path, typed: str = "") -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, *words], cwd=cwd, input=typed, capture_output=True, text=True, check=False
    )
