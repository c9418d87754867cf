"""An outsider on the network: sends garbage to a launcher, or tries to reach a torch store.

`store` and `junk` change keys of a torch store, `junk` all of them.

meddle.py knock|reach|store|junk HOST PORT [FROM]
"""

import socket
import sys
from contextlib import suppress
from datetime import timedelta

HELLO = b"\x00\xce\xf7\x85\x3c"
"""How a client of torch's store begins."""

what, host, port = sys.argv[1], sys.argv[2], int(sys.argv[3])
if what == "knock":
    said = [
        b"GET / HTTP/1.1\r\n\r\n",
        HELLO + b"\xff" * 64,
        b"x" * 5000,
        b"\n",
        b"{}",
    ]
    kept = []
    for each in [*said, *[b""] * 50]:
        kept.append(socket.create_connection((host, port)))
        kept[-1].sendall(each)
    print("knocked", flush=True)
    sys.stdin.read()  # some stay connected until this ends
elif what == "reach":
    try:
        own = (sys.argv[4], 0) if sys.argv[4:] else None
        with socket.create_connection((host, port), timeout=2, source_address=own) as connection:
            connection.sendall(HELLO + b"\xff" * 64)
            with suppress(ConnectionResetError):
                connection.recv(1)  # a store closes the connection
        print("reached")
    except TimeoutError:
        print("not reached")
else:
    from torch.distributed import TCPStore

    store = TCPStore(
        host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=9)
    )
    if what == "junk":
        for key in store.list_keys():
            store.set(key, "junk")
        print("junk", flush=True)
        sys.exit()
    for key in ("torchelastic/agent/terminal_state", "default_pg/0//cuda//timeout_dump", "failed"):
        store.set(key, "1")
    print("read back", store.get("failed").decode(), flush=True)
