"""Print that the rank is up, then wait for ever; `deaf` ignores the signals that stop it."""

import os
import signal
import subprocess
import sys

if "deaf" in sys.argv:
    for name in ("SIGTERM", "SIGINT", "SIGHUP"):
        signal.signal(getattr(signal, name), signal.SIG_IGN)
if "children" in sys.argv:
    subprocess.Popen(["sleep", "600"])
    subprocess.Popen(["sleep", "600"], start_new_session=True)
    if os.fork() == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.pause()
print("up", os.environ["RANK"], flush=True)
while True:
    signal.pause()
