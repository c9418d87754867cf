"""Write what a worker sees to SEEN_DIR/<rank>.json, print a few lines, and end as SEEN_END says.

SEEN_ASK: what to look at only on request, `torch` and `stdin`.
SEEN_END: an exit code or a signal's name for the last rank.
"""

import faulthandler
import gc
import json
import logging
import multiprocessing
import os
import resource
import signal
import sys
import threading
import time


def disposition(number):
    found = signal.getsignal(number)
    return getattr(found, "__name__", str(found))


def limits():
    names = sorted(name for name in dir(resource) if name.startswith("RLIMIT_"))
    return {name: resource.getrlimit(getattr(resource, name)) for name in names}


def umask():
    mask = os.umask(0)
    os.umask(mask)
    return mask


def stream(file):
    return [file.encoding, file.errors, file.line_buffering, file.write_through]


asked = os.environ.get("SEEN_ASK", "").split()
seen = {
    "environment": dict(os.environ),
    "argv": sys.argv,
    "flags": repr(sys.flags),
    "options": [sys.warnoptions, sys._xoptions],
    "executable": [sys.executable, sys.prefix],
    "cwd": os.getcwd(),
    "name": [__name__, __package__],
    "file": __file__,
    "path": sys.path,
    "streams": [stream(sys.stdin), stream(sys.stdout), stream(sys.stderr)],
    "stdin": os.readlink("/proc/self/fd/0"),
    "leads": [os.getsid(0) == os.getpid(), os.getpgid(0) == os.getpid()],
    "umask": umask(),
    "signals": {number.name: disposition(number) for number in signal.valid_signals()
                if isinstance(number, signal.Signals)},
    "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
    "limits": limits(),
    "nice": os.nice(0),
    "cores": sorted(os.sched_getaffinity(0)),
    "thread": [threading.current_thread().name, threading.active_count()],
    "process": [multiprocessing.current_process().name, multiprocessing.parent_process() is None,
                multiprocessing.current_process().daemon, multiprocessing.get_start_method(True)],
    "gc": [gc.isenabled(), gc.get_threshold(), gc.get_debug()],
    "hooks": [sys.excepthook is sys.__excepthook__, sys.gettrace() is None,
              threading.excepthook is threading.__excepthook__],
    "faulthandler": faulthandler.is_enabled(),
    "logging": [len(logging.root.handlers), logging.root.level],
    "recursion": [sys.getrecursionlimit(), sys.getswitchinterval()],
}  # fmt: skip
if "stdin" in asked:
    seen["text"] = sys.stdin.read()
if "torch" in asked:
    import torch.distributed

    seen["elastic"] = torch.distributed.is_torchelastic_launched()
    seen["threads"] = [torch.get_num_threads(), torch.is_grad_enabled(), torch.initial_seed()]

rank, folder = int(os.environ["RANK"]), os.environ["SEEN_DIR"]
for number, fd in ((1, "stdout"), (2, "stderr")):
    for fruit in ("apple", "pear", "orange"):  # one write per line: torchrun mixes halves
        os.write(number, f"{fruit} of {rank} on {fd}\n".encode())
again = os.environ["TORCHELASTIC_RESTART_COUNT"]
suffix = ".json" if again == "0" else f"-{again}.json"
name = f"{folder}/{rank}{suffix}"
with open(f"{name}.part", "w") as file:
    json.dump(seen, file)
os.rename(f"{name}.part", name)

end, last = os.environ.get("SEEN_END", ""), int(os.environ["WORLD_SIZE"]) - 1
if end and rank == last:
    others = [f"{folder}/{other}{suffix}" for other in range(last)]
    while not all(map(os.path.exists, others)):
        time.sleep(0.001)
    if end.isdigit():
        sys.exit(int(end))
    os.kill(os.getpid(), getattr(signal, end))
    threading.Event().wait()
