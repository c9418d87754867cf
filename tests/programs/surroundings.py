"""Print everything that a process inherits."""

import json
import locale
import multiprocessing.process
import os
import resource
import signal
import sys
import time

IGNORED = ("MESHRUN_LAUNCH_MARK", "MESHRUN_WORKER_PID", "MASTER_PORT", "TORCHELASTIC_RUN_ID",
           "TORCHELASTIC_ERROR_FILE", "MESHRUN_RUN_ID")  # fmt: skip
STATUS = ("Uid", "Gid", "Groups", "SigBlk", "SigIgn", "SigCgt", "CapEff", "NoNewPrivs", "Seccomp")


def status():
    with open("/proc/self/status") as file:
        pairs = (line.partition(":") for line in file)
        found = {name: value.split() for name, _, value in pairs if name in STATUS}
    ignored = int(found["SigIgn"][0], 16)  # glibc's two internal ones, after posix_spawn()
    return {**found, "SigIgn": hex(ignored & ~(0b11 << 31))}


def name_of(handler):
    return getattr(handler, "__qualname__", str(handler))


def descriptors():
    found = {}
    for number in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{number}")
        except OSError:
            continue
        kind = f"{target.partition(':')[0]} {os.get_inheritable(int(number))}"
        found[kind] = found.get(kind, 0) + 1
    return found


print(
    json.dumps(
        {
            "environment": {k: v for k, v in os.environ.items() if k not in IGNORED},
            "folder": [os.getcwd(), multiprocessing.process.ORIGINAL_DIR],
            "umask": os.umask(0o022),
            "limits": {
                name: resource.getrlimit(getattr(resource, name))
                for name in dir(resource)
                if name.startswith("RLIMIT_")
            },
            "nice": os.nice(0),
            "cpus": sorted(os.sched_getaffinity(0)),
            "status": status(),
            "files": {
                name: open(f"/proc/self/{name}").read()
                for name in ("oom_score_adj", "coredump_filter", "timerslack_ns")
            },
            "handlers": {int(s): name_of(signal.getsignal(s)) for s in signal.valid_signals()},
            "stdin": sys.stdin.read(),
            "streams": [stream.encoding for stream in (sys.stdin, sys.stdout, sys.stderr)],
            "argv": sys.argv,
            "orig_argv": sys.orig_argv,
            "path": sys.path,
            "flags": str(sys.flags),
            "locale": locale.setlocale(locale.LC_ALL),
            "zone": [time.tzname, time.localtime(0)[:6]],
            "leads": [os.getsid(0) == os.getpid(), os.getpgrp() == os.getpid()],
            "modules": sorted(name for name in sys.modules if not name.startswith("meshrun.")),
            "cgroup": open("/proc/self/cgroup").read(),
            "descriptors": descriptors(),
            "main": sorted(vars(sys.modules["__main__"])),
        }
    )
)
