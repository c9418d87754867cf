"""Print lines until FOLDER/go exists: ticks.py FOLDER."""

import os
import sys
import time

count = 0
while not os.path.exists(f"{sys.argv[1]}/go"):
    print("tick", count := count + 1, flush=True)
    time.sleep(0.05)
