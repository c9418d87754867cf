"""The last rank reports steps and ends in a given way, while the others wait for its end.

steps.py 1-5:raise 3-9:end: a word per generation, and the last one for all that follow. A way is
"end", a signal's name, an exit code, or the message of an exception.
"""

import os
import signal
import sys

from meshrun import progress

words, is_last = sys.argv[1:], int(os.environ["RANK"]) + 1 == int(os.environ["WORLD_SIZE"])
word = words[min(int(os.environ["TORCHELASTIC_RESTART_COUNT"]), len(words) - 1)]
steps, _, way = word.partition(":")
first, _, last = steps.partition("-")
print("up", flush=True)
if not is_last and way != "end":
    signal.pause()
for step in range(int(first), int(last) + 1) if steps else ():
    progress(step)
if way.isdigit():
    sys.exit(int(way))
elif way.startswith("SIG"):
    os.kill(os.getpid(), getattr(signal, way))
elif way != "end":
    raise ValueError(way)
