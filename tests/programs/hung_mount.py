"""Mount a file system that never answers: what accesses it survives SIGKILL until this ends.

The file ``accessed`` beside it is created when that happens first.
"""

import ctypes
import os
import struct
import sys

FUSE_INIT, VERSION = 26, (7, 31)
REQUEST, ANSWER = struct.Struct("<IIQ"), struct.Struct("<IiQ")
INITIALIZED = struct.Struct("<4I2H2I2H8I")

folder = sys.argv[1].encode()
device = os.open("/dev/fuse", os.O_RDWR)
options = f"fd={device},rootmode=40000,user_id=0,group_id=0".encode()
libc = ctypes.CDLL(None, use_errno=True)
if libc.mount(b"hung", folder, b"fuse", 0, options):
    sys.exit(os.strerror(ctypes.get_errno()))
while True:
    _, kind, number = REQUEST.unpack_from(os.read(device, 1 << 20))
    if kind == FUSE_INIT:
        answer = INITIALIZED.pack(*VERSION, 0, 0, 1, 1, 4096, 1, 0, 0, *[0] * 8)
        os.write(device, ANSWER.pack(ANSWER.size + len(answer), 0, number) + answer)
        print("mounted", flush=True)
    else:
        open(os.path.join(os.path.dirname(folder), b"accessed"), "w").close()
