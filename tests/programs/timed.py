"""Set torch elastic's timers: one that is released in time, and on rank 1 one that expires."""

import json
import os
import signal
import time

path = os.environ["TORCHELASTIC_TIMER_FILE"]


def send(after: float, scope: str) -> None:
    request = {
        "version": 1,
        "pid": os.getpid(),
        "scope_id": scope,
        "expiration_time": time.time() + after if after >= 0 else -1,
        "signal": int(signal.SIGKILL),
    }
    with open(path, "w") as pipe:
        pipe.write(json.dumps(request) + "\n")


send(0.2, "in time")
send(-1, "in time")
if os.environ["RANK"] == "1":
    send(0.2, "too late")
signal.pause()
