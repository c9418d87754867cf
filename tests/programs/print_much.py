"""Print numbered lines of 100 characters to stdout."""

import os
import sys

rank = os.environ["RANK"]
for number in range(int(sys.argv[1])):
    print(f"{rank}:{number}".ljust(99, "."))
