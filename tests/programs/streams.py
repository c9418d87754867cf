"""Write to both streams, and read the third."""

import sys

print(f"out, read {sys.stdin.read()!r}")
print("err", file=sys.stderr)
