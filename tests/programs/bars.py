"""Print progress bars, invalid UTF-8, a Windows line ending and an open last line."""

import sys

out = sys.stdout.buffer
for percent in (10, 50, 100):
    out.write(b"\r%d%%" % percent)
    out.flush()
out.write(b"\n")
out.write(b"bad \xff\xfe bytes\n")
out.write(b"windows\r\n")
out.write("snow \u2603\n".encode())
out.write(b"no end")
out.flush()
