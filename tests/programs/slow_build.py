"""A module to preload: each rank prints when its mesh is built, and rank 1 builds it slowly."""

import hashlib
import os
import time

from meshrun.worker import process_group

build = process_group.build_mesh


def build_slowly(*arguments):
    mesh = build(*arguments)
    if os.environ["RANK"] == "1":
        hashlib.pbkdf2_hmac("sha256", b"", b"", 1_000_000)
    os.write(1, f"built {time.monotonic_ns()}\n".encode())
    return mesh


process_group.build_mesh = build_slowly
