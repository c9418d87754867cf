"""Print the generation; in the first COUNT generations, fail on rank 1.

generations.py COUNT HOW: HOW is a signal's name, an exit code or "raise".
"""

import os
import signal
import sys

from meshrun import current_layout

generation = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
assert current_layout().generation == generation
before = current_layout().previous
assert (before.generation if before else -1) == generation - 1
assert before in (None, current_layout())
print(f"generation {generation} at {os.environ['MASTER_PORT']}", flush=True)
count, how = int(sys.argv[1]), sys.argv[2]
if generation < count:
    if os.environ["RANK"] != "1":
        signal.pause()
    if how == "raise":
        raise ValueError("the loss is nan")
    if how.isdigit():
        sys.exit(int(how))
    os.kill(os.getpid(), getattr(signal, how))
