"""Report the rank's progress through files, and print until a file lets it continue.

chaos.py FOLDER HOLD GENERATION WORD...: wait for FOLDER/go at HOLD (training, ending) of
GENERATION. Words: deaf, children, watch, fill, fails=RANK, leaves (a deaf orphan when it fails).
"""

import atexit
import os
import signal
import subprocess
import sys
import time

folder, hold, generation, *words = sys.argv[1:]
rank, now = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
counter = os.open(f"{folder}/count.{now}.{rank}", os.O_WRONLY | os.O_CREAT)
printed = []
child = 0


def say(more=""):
    """Print a line, and only then count it."""
    print(f"line {now} {rank} {len(printed)}{more}", flush=True)
    printed.append(more)
    os.pwrite(counter, b"%d" % len(printed), 0)


def announce(what, number):
    path = f"{folder}/{what}.{now}.{rank}"
    with open(f"{path}~", "w") as file:
        file.write(str(number))
    os.rename(f"{path}~", path)


def reach(place):
    if (place, now) != (hold, generation):
        return
    announce("at", os.getpid())
    while not os.path.exists(f"{folder}/go"):
        if "watch" in words and os.waitpid(child, os.WNOHANG)[0]:
            raise RuntimeError("a worker died")
        say()
        time.sleep(0.002)  # only limits how fast it prints


def ignore_requests():
    for name in ("SIGTERM", "SIGINT", "SIGHUP"):
        signal.signal(getattr(signal, name), signal.SIG_IGN)


def end():
    reach("ending")
    say()


if "deaf" in words:
    ignore_requests()
if "children" in words:
    child = os.fork()
    while child == 0:
        signal.pause()
    announce("child", child)
    announce("session", subprocess.Popen(["sleep", "600"], start_new_session=True).pid)
for _ in range(5):
    say()
if now == "0" and f"fails={rank}" in words:
    if "leaves" in words:
        ignore_requests()  # its child inherits this
        subprocess.Popen(["sleep", "600"], start_new_session=True)
    sys.exit(3)
while now == "0" and any(word.startswith("fails=") for word in words):
    signal.pause()
while "fill" in words:
    say("x" * 1000)
atexit.register(end)
reach("training")
