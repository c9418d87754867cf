"""``python -m tests.fuzz NAME SECONDS``: fuzz one target with atheris.

atheris observes which branches of meshrun an input reaches, and mutates inputs that reach new
ones. A finding ends this process and is written to a file in the current folder.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["meshrun"]):
    from tests.fuzz.targets import SEEDS, TARGETS


def main() -> None:
    """Fuzz for SECONDS."""
    name, seconds = sys.argv[1:]
    words = [f"-max_total_time={seconds}", "-max_len=200", "-timeout=20", "-rss_limit_mb=2048"]
    with tempfile.TemporaryDirectory() as folder:
        for index, seed in enumerate(SEEDS[name]):
            Path(folder, f"seed{index}").write_bytes(seed)
        words += [f"-artifact_prefix={os.getcwd()}/", "-close_fd_mask=1", folder]
        atheris.Setup([sys.argv[0], *words], TARGETS[name])
        atheris.Fuzz()


if __name__ == "__main__":
    main()
