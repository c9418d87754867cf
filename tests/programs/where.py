"""Print `up`, then do what the argument says for this rank: `where.py 0=sleep rest=spin`.

sleep, spin, print and beat run for ever; thread sleeps, as does a second thread; closed
sleeps after closing all descriptors from 3 on; stop stops itself.
"""

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


def sleep_alone():
    os.closerange(3, 4096)
    sleep_soundly()


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
    "closed": sleep_alone,
    "stop": stop_here,
    "last-beat": stop_beating,
}
asked = dict(word.split("=") for word in sys.argv[1:])
rank, again = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
way = asked.get(f"{rank}.{again}") or asked.get(rank) or asked["rest"]
print("up", rank, flush=True)
if way != "end":
    WAYS[way]()
