"""One-line descriptions of exceptions, and what they are recognized by."""

from __future__ import annotations

import pytest

from meshrun.protocol.rank_end import (
    RankRaised,
    aborted_for_lost_peer,
    ended_collective,
    headline,
    killed_worker,
    lacks_processes,
    lost_connection,
    timed_out,
    why_aborted,
)

IN_WORKER = """Caught KeyError in DataLoader worker process 1.
Original Traceback (most recent call last):
  File "/lib/torch/utils/data/_utils/worker.py", line 374, in _worker_loop
    data = fetcher.fetch(index)
           ^^^^^^^^^^^^^^^^^^^^
  File "/home/me/data.py", line 31, in __getitem__
    return self.names[index]
KeyError: 'no such name
in two lines'
"""
SPAWNED = """

-- Process 1 terminated with the following error:
Traceback (most recent call last):
  File "/lib/torch/multiprocessing/spawn.py", line 87, in _wrap
    fn(i, *args)
  File "/home/me/train.py", line 3, in train
    raise ValueError("the loss is nan")
ValueError: the loss is nan
"""
STATE = """Error(s) in loading state_dict for Net:
\tMissing key(s) in state_dict: "bias".
\tUnexpected key(s) in state_dict: "scale".
"""
COMPILED = """at 4:11:
def kernel(x):
    a = tl.load(x)
    b = a + foo
            ^
NameError('foo is not defined')"""
"""As Triton raises it."""
BY_INDUCTOR = f"""SubprocException: An exception occurred in a subprocess:

Name=triton_poi_fused_add_0
Traceback (most recent call last):
  File "/lib/torch/_inductor/compile_worker/subproc_pool.py", line 430, in do_job
    result = job()
             ^^^^^
triton.compiler.errors.CompilationError: {COMPILED}


Set TORCHDYNAMO_VERBOSE=1 for the internal stack trace
"""
NCCLS = """NCCL error in: /pytorch/NCCLUtils.cpp:93, invalid usage (run with NCCL_DEBUG=WARN for \
details), NCCL version 2.28.9
ncclInvalidUsage: This usually reflects invalid usage of NCCL library.
Last error:
Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 60"""
"""As torch 2.11 raised it on an H100."""
GONE = "DataLoader worker (pid(s) 27729) exited unexpectedly"
KILLED = "DataLoader worker (pid 27729) is killed by signal: Killed"
FULL = "DataLoader worker (pid 5) is killed by signal: Bus error. It is possible that dataloader's"


def raised(message: str, kind: str = "RuntimeError", traceback: str = "") -> RankRaised:
    return RankRaised(
        rank=0, at_ns=0, kind=kind, message=message, traceback=traceback or message, shown=False
    )


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (raised("", "MemoryError"), "MemoryError"),
        (raised("the loss is nan", "ValueError"), "ValueError: the loss is nan"),
        (raised("no such operation.", "ValueError"), "ValueError: no such operation"),
        (raised("and so on...", "ValueError"), "ValueError: and so on..."),
        (raised("one\ntwo"), "RuntimeError: one"),
        (raised("[/src/gloo/transport/tcp/pair.cc:5] Read error"), "RuntimeError: Read error"),
        (raised("\n=====\na.py FAILED\n-----\n", "E"), "E: a.py FAILED"),
        (raised("====="), "RuntimeError: ====="),
        (raised("a\x1b[31m"), "RuntimeError: a\\x1b[31m"),
        (raised("x" * 500), f"RuntimeError: {'x' * 226}..."),
        (raised("one two. " * 60), f"RuntimeError: {'one two. ' * 24}one two..."),
        (
            raised(NCCLS, "DistBackendError"),
            "DistBackendError: ncclInvalidUsage: Duplicate GPU detected : rank 1 and rank 0 both on"
            " CUDA device 60",
        ),
        (
            raised(NCCLS.partition("Duplicate")[0], "DistBackendError"),
            "DistBackendError: NCCL error in: /pytorch/NCCLUtils.cpp:93, invalid usage (run with"
            " NCCL_DEBUG=WARN for details), NCCL version 2.28.9",
        ),
        (raised(IN_WORKER, "KeyError"), "KeyError: 'no such name, in DataLoader worker process 1"),
        (raised(SPAWNED, "ProcessRaisedException"), "ValueError: the loss is nan, in process 1"),
        (
            raised(STATE),
            "RuntimeError: Error(s) in loading state_dict for Net: Missing key(s) in state_dict:"
            ' "bias"',
        ),
        (
            raised(COMPILED, "CompilationError"),
            "CompilationError: at 4:11: NameError('foo is not defined')",
        ),
        (
            raised(BY_INDUCTOR, "InductorError"),
            "triton.compiler.errors.CompilationError: at 4:11: NameError('foo is not defined'), in"
            " triton_poi_fused_add_0",
        ),
        (raised("Caught it in time.", "ValueError"), "ValueError: Caught it in time"),
        (
            raised(GONE, traceback=f"RuntimeError: {KILLED}. \n\n{GONE}\n"),
            f"RuntimeError: {KILLED}",
        ),
        (raised(GONE), f"RuntimeError: {GONE}"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_headline_is_one_line(error: RankRaised, told: str) -> None:
    """One line without a final period; if a subprocess raised, its exception."""
    assert headline(error) == told


def test_a_killed_dataloader_worker_is_recognized() -> None:
    """Its description has the signal that torch names."""
    assert killed_worker(raised(GONE, traceback=f"RuntimeError: {KILLED}. \n")) == KILLED
    assert killed_worker(raised(FULL)) == FULL.partition(". ")[0]
    assert killed_worker(raised("bad")) is None


def test_a_process_or_thread_that_cannot_be_started_is_recognized() -> None:
    """The error of a fork is that of a socket without data, too."""
    again = "[Errno 11] Resource temporarily unavailable"
    forked = f"    self.pid = os.fork()\n               ^^^^^^^^^\nBlockingIOError: {again}"
    assert lacks_processes(raised(again, "BlockingIOError", traceback=forked))
    assert lacks_processes(raised("can't start new thread"))
    assert not lacks_processes(raised(again, "BlockingIOError", traceback="    data = s.recv(1)"))
    assert not lacks_processes(raised("can't start new thread", "ValueError"))


def test_a_connection_lost_in_torch_is_recognized() -> None:
    """Only by torch's own types of errors, raised from its own files."""
    said = "[pair.cc:553] Connection closed by peer [127.0.0.1]:3"
    here = f'  File "/home/me/train.py", line 1, in <module>\nRuntimeError: {said}'
    theirs = f'  File "/lib/torch/distributed/c10d.py", line 1, in f\nRuntimeError: {said}'

    assert lost_connection(raised(said))
    assert lost_connection(raised(said, traceback=theirs))
    assert not lost_connection(raised(said, traceback=here))
    by_gloo = f"[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] {said}"
    assert lost_connection(raised(by_gloo, traceback=here))  # from work.wait()
    by_rank_1 = "[/g/gloo/transport/tcp/unbound_buffer.cc:78] Timed out"
    reported = (
        f"Rank 2 successfully reached monitoredBarrier, but received errors while {by_rank_1}"
    )
    assert lost_connection(raised(reported, traceback=theirs))
    assert not lost_connection(raised(by_rank_1, traceback=theirs))
    by_rpc = "eof (this error originated at tensorpipe/transport/shm/connection_impl.cc:259)"
    assert lost_connection(raised(by_rpc, traceback=here))  # from the future of rpc_async()
    assert not lost_connection(raised(said, "ValueError"))
    assert not lost_connection(raised("out of memory"))
    assert lost_connection(raised(REMOTE, "DistBackendError", traceback=here))  # from work.wait()


@pytest.mark.parametrize(
    ("traceback", "has"),
    [
        ("RuntimeError: [/g/gloo/transport/tcp/pair.cc:5] Read error", True),
        ("torch.distributed.DistBackendError: NCCL error", True),
        ("torch.distributed.DistStoreError: wait timeout after 3000ms", False),
        ("Rank 1 failed to pass monitoredBarrier [/g/gloo/transport/tcp/pair.cc:5]", False),
    ],
)
def test_an_exception_that_ended_a_recorded_call(traceback: str, has: bool) -> None:
    """Otherwise, the last recorded call is an earlier one, which has ended."""
    assert ended_collective(traceback) == has


def test_a_stack_of_c_is_no_timeout() -> None:
    """Its frames have names such as ``TCPClient::receiveValueWithTimeout()``."""
    stack = "\nException raised from recvBytes at /c10d/Utils.hpp:682\nframe #3: waitTimeout()"
    traceback = '  File "/lib/torch/distributed/c10d.py", line 1, in f\nDistBackendError: no'

    assert not timed_out(f"failed to recv, got 0 bytes{stack}", traceback)
    assert timed_out(f"wait timeout after 300000ms, keys: /default_pg/0{stack}", traceback)


REMOTE = """NCCL error: remote process exited or there was a network error, NCCL version 2.28.9
ncclRemoteError: A call failed possibly due to a network error or a remote process exiting.
Last error:
"""
CLOSED = "socketProgress: Connection closed by remote peer gpu02<42830>"
WATCHDOG = "[PG ID 0 PG GUID 0(default_pg) Rank 3] Process group watchdog thread terminated"
LATE = (
    "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE, NumelIn=1,"
    " NumelOut=1, Timeout(ms)=600000) ran for 600027 milliseconds before timing out"
)
STUCK = "Terminating the process after attempting to dump debug info, due to watchdog hang"


@pytest.mark.parametrize(
    ("printed", "error", "for_peer"),
    [
        (f"  what():  {WATCHDOG} with exception: [Rank 3] {LATE}.", LATE, False),
        (
            f"  what():  {WATCHDOG} with exception: {REMOTE}{CLOSED}",
            f"ncclRemoteError: {CLOSED}",
            True,
        ),
        (
            f"  what():  {WATCHDOG} with exception: {REMOTE}Exception raised from check at N.cpp:2",
            REMOTE.partition("\n")[0],
            True,
        ),
        (
            f"[rank3]:[E1126 10:00:00.1 N.cpp:2] {WATCHDOG} with exception: HIP error: unknown\n"
            "terminate called after throwing an instance of 'c10::DistBackendError'\n"
            "terminate called recursively",
            "HIP error: unknown",
            False,
        ),
        (f"[rank3]:[F1126 10:00:00.1 N.cpp:2] [PG ID 0 PG GUID 0 Rank 3] {STUCK}.", STUCK, False),
        ("  what():  std::bad_alloc", "std::bad_alloc", False),
        ("[rank3]:[W1126 10:00:00.1 N.cpp:2] Warning: no\nfree(): invalid pointer", "", False),
        (
            "  what():  cannot connect: Connection refused",
            "cannot connect: Connection refused",
            False,
        ),
    ],
)
def test_the_error_for_which_a_rank_was_aborted(printed: str, error: str, for_peer: bool) -> None:
    """As torch 2.9 to 2.14, C++ and glibc print it, with the stacks left out."""
    assert why_aborted(printed.splitlines()) == error
    assert aborted_for_lost_peer(error) == for_peer
