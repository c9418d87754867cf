"""End on rank 1 in the way given by the argument; the others wait until they are stopped."""

import os
import signal
import sys
import threading

how = sys.argv[1]
if os.environ["RANK"] != "1":
    print("waiting", flush=True)
    signal.pause()
if how == "raise":
    raise ValueError("the loss is nan")
if how == "chain":
    try:
        {}["lr"]
    except KeyError as error:
        raise RuntimeError("no learning rate") from error
if how == "text":
    sys.exit("the config is missing")
if how == "mute":
    sys.exit(type("Mute", (), {"__str__": lambda _: sys.exit(5)})())
if how.isdigit():
    sys.exit(int(how))
if how == "SIGKILL":  # after a child has crashed
    if os.fork() == 0:
        os.kill(os.getpid(), signal.SIGSEGV)
    os.wait()
if how.startswith("SIG"):
    os.kill(os.getpid(), getattr(signal, how))
    threading.Event().wait()
if how == "odd":
    raise ValueError("a\ud800b\x1b[31m")
