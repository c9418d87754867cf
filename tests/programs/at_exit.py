"""Everything that Python does at the end of a program; each part writes a file."""

import atexit
import os
import signal
import sys
import threading
import time

folder = sys.argv[1] + "/" + os.environ.get("RANK", "alone")
os.makedirs(folder, exist_ok=True)


def leave(name):
    with open(f"{folder}/{name}", "w") as file:
        file.write(name)


class Global:
    def __del__(self):
        os.write(1, b"freed\n")  # globals still exist


class Trainer:
    def __del__(self):
        leave("handler")

    def checkpoint(self, *_):
        pass


def late():
    time.sleep(0.05)
    leave("thread")


atexit.register(leave, "atexit")
kept = Global()
signal.signal(signal.SIGUSR1, Trainer().checkpoint)
unflushed = open(f"{folder}/unflushed", "w")
unflushed.write("unflushed")
cycle = [open(f"{folder}/cycle", "w")]
cycle.append(cycle)
cycle[0].write("cycle")
threading.Thread(target=late).start()
sys.stdout.write("no newline at the end")
sys.exit(int(sys.argv[2]))
