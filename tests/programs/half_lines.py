"""Write lines in halves, so that halves from different ranks mix in the launcher."""

import os
import sys
import time

rank = os.environ["RANK"]
for number in range(30):
    for half in (f"first-{number}-{rank} ", f"second-{number}-{rank}\n"):
        sys.stdout.write(half)
        sys.stdout.flush()
        time.sleep(0.001)
