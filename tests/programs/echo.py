"""Print one line to each stream."""

import os
import sys

print("out", os.environ["RANK"])
print("err", os.environ["RANK"], file=sys.stderr)
