"""A stand-in for torch that imports at once and counts how often it is imported."""

import os

if path := os.environ.get("FAKE_TORCH_IMPORTS"):
    with open(path, "a") as file:
        file.write(f"{os.getpid()}\n")
if os.environ.get("FAKE_TORCH_BREAKS"):
    raise ImportError("libtorch_cpu.so: cannot open shared object file")
if os.environ.get("FAKE_TORCH_THREAD"):
    import threading

    threading.Thread(target=threading.Event().wait, daemon=True).start()
if path := os.environ.get("FAKE_TORCH_WAITS"):
    with open(path):  # a FIFO: until the test opens its other end
        pass


class cuda:  # noqa: N801
    @staticmethod
    def is_initialized():
        return False


def set_num_threads(count):
    pass
