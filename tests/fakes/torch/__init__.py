"""A stand-in for torch that imports at once and counts how often it is imported."""

import hashlib  # noqa: F401 - as torch does
import multiprocessing  # noqa: F401 - as torch does
import os
import time

if path := os.environ.get("FAKE_TORCH_IMPORTS"):
    with open(path, "a", encoding="utf-8") as file:
        file.write(f"{os.getpid()}\n")
if version := os.environ.get("FAKE_TORCH_VERSION"):
    __version__ = version
if os.environ.get("FAKE_TORCH_BREAKS"):
    raise ImportError("libtorch_cpu.so: cannot open shared object file")
if os.environ.get("FAKE_TORCH_THREAD"):
    import threading

    threading.Thread(target=threading.Event().wait, daemon=True).start()
if path := os.environ.get("FAKE_TORCH_WAITS"):
    with open(path):  # a FIFO: until the test opens its other end
        pass


def hold(place):
    """Report in the folder that this place is reached; continue once it contains a file `go`."""
    folder = os.environ.get("FAKE_TORCH_HOLDS_IN")
    now = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if folder is None or os.environ["FAKE_TORCH_HOLDS_AT"] != f"{place} {now}":
        return
    name = f"{folder}/at.{now}.{os.environ.get('RANK', 'zygote')}"
    with open(f"{name}~", "w") as file:
        file.write(str(os.getpid()))
    os.rename(f"{name}~", name)
    while not (os.access(f"{folder}/go", os.F_OK) or time.sleep(0.002)):
        pass  # the loop is on one line, so every dump of the stack shows the same


hold("importing")


def set_num_threads(count):
    hold("joining")
