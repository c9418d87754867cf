"""Print as JSON what a program sees of itself."""

import json
import os
import sys

main = sys.modules["__main__"]
print(
    json.dumps(
        {
            "argv": sys.argv,
            "orig_argv": sys.orig_argv[1:],
            "path0": sys.path[0],
            "file": main.__file__,
            "name": __name__,
            "spec": repr(main.__spec__ and main.__spec__.name),
            "package": main.__package__,
            "loader": type(main.__loader__).__name__,
            "cwd": os.getcwd(),
            "names": sorted(name for name in vars(main) if name.startswith("__")),
            "unbuffered": sys.stdout.write_through,
            "sigint": repr(__import__("signal").getsignal(2)),
            "sigterm": repr(__import__("signal").getsignal(15)),
            "thread": __import__("threading").main_thread().native_id == os.getpid(),
            "mask": sorted(__import__("signal").pthread_sigmask(0, [])),
        }
    )
)
