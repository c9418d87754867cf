"""Print `up`, then do what the argument says for this rank: `where.py 0=sleep rest=spin`.

sleep, spin, print and beat run for ever; thread sleeps, as does a second thread; busy waits in
native code beside a thread that calls functions; locked keeps the interpreter's lock beside a
thread; closed sleeps after closing all descriptors from 3 on; stop stops itself;
exec runs another program.
"""

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time

from meshrun import heartbeat


def sleep_soundly():
    time.sleep(1000)


def spin():
    while True:
        pass


def keep_printing():
    while True:
        print("still here", flush=True)
        time.sleep(0.02)


def keep_beating():
    while True:
        heartbeat()
        time.sleep(0.02)


def wait_beside_a_thread():
    threading.Thread(target=sleep_soundly, daemon=True).start()
    sleep_soundly()


def call(depth):
    exec("def f(n):\n    return [i for i in range(n)]\nf(3)", {})
    return depth and 1 + call(depth - 1)


def call_and_call():
    while True:
        call(100)


def wait_beside_a_busy_thread():
    threading.Thread(target=call_and_call, daemon=True).start()
    ctypes.CDLL(None).poll(None, 0, -1)  # any signal ends it


def keep_the_lock():
    threading.Thread(target=sleep_soundly, daemon=True).start()
    reads, _ = os.pipe()
    ctypes.PyDLL(None).read(reads, ctypes.create_string_buffer(1), 1)


def sleep_alone():
    os.closerange(3, 4096)
    sleep_soundly()


def run_another_program():
    with contextlib.suppress(OSError):
        os.execv("/nonexistent", ["sleep"])
    os.execvp("sleep", ["sleep", "1000"])


def stop_here():
    os.kill(os.getpid(), signal.SIGSTOP)
    sleep_soundly()


def stop_beating():
    heartbeat()
    spin()


WAYS = {
    "sleep": sleep_soundly,
    "spin": spin,
    "print": keep_printing,
    "beat": keep_beating,
    "thread": wait_beside_a_thread,
    "busy": wait_beside_a_busy_thread,
    "locked": keep_the_lock,
    "closed": sleep_alone,
    "exec": run_another_program,
    "stop": stop_here,
    "last-beat": stop_beating,
}
asked = dict(word.split("=") for word in sys.argv[1:])
rank, again = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
way = asked.get(f"{rank}.{again}") or asked.get(rank) or asked["rest"]
print("up", rank, flush=True)
if way != "end":
    WAYS[way]()
