"""The program of ranks that print: ``print_program.py MEGABYTES GATE LINES``, 100 bytes per line.

With LINES = 1, each line is a separate ``print`` to an unbuffered stdout, which takes most of the
time; otherwise each ``print`` has that many lines, of which the first is numbered.
"""

from __future__ import annotations

import os
import sys

rank = int(os.environ["RANK"])
count = int(sys.argv[1]) * 10_000
gate = os.open(sys.argv[2], os.O_RDONLY | os.O_NONBLOCK)
os.set_blocking(gate, True)
print("ready", flush=True)
os.read(gate, 1)
at_once = int(sys.argv[3])
rest = "".join(f"\nrank {rank:03d} step         ~ ".ljust(100, ".") for _ in range(at_once - 1))
for number in range(0, count, at_once):
    print(f"rank {rank:03d} step {number:09d} ".ljust(99, ".") + rest)
