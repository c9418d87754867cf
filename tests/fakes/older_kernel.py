"""Runs meshrun as on Linux 4.18: the kernel knows no system call that is newer (seccomp(2))."""

import ctypes
import errno
import os
import struct
import sys

_PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS, _FILTER = 22, 38, 2
_FIRST_NEWER = 424
"""``pidfd_send_signal``, of Linux 5.1; from it on, the numbers are those of all architectures."""
_LOAD, _IF_AT_LEAST, _RETURN = 0x20, 0x35, 0x06
_ALLOW, _FAIL = 0x7FFF0000, 0x00050000

steps = (
    (_LOAD, 0, 0, 0),
    (_IF_AT_LEAST, 0, 1, _FIRST_NEWER),
    (_RETURN, 0, 0, _FAIL | errno.ENOSYS),
    (_RETURN, 0, 0, _ALLOW),
)
code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *step) for step in steps))
program = ctypes.create_string_buffer(struct.pack("@HP", len(steps), ctypes.addressof(code)))
libc = ctypes.CDLL(None)
assert libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
assert libc.prctl(_PR_SET_SECCOMP, _FILTER, program, 0, 0) == 0
os.execv(sys.executable, [sys.executable, "-m", "meshrun", *sys.argv[1:]])
