"""Ranks named in the arguments handle SIGUSR1 and continue; it would kill the others.

A rank that handles it asks its child, by SIGUSR2, which signals the child has received.
"""

import os
import signal
import subprocess
import sys

rank = os.environ["RANK"]
CHILD = """
import signal
got = []
signal.signal(signal.SIGUSR1, lambda number, _: got.append(number))
signal.signal(signal.SIGUSR2, lambda number, _: print("child got", got, flush=True))
print("child up", flush=True)
while True:
    signal.pause()
"""


def note(number, frame):
    print("got", signal.Signals(number).name, flush=True)
    child.send_signal(signal.SIGUSR2)


if rank in sys.argv[1:]:
    child = subprocess.Popen([sys.executable, "-c", CHILD])
    signal.signal(signal.SIGUSR1, note)
print("up", rank, flush=True)
while True:
    signal.pause()
