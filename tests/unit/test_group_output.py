"""What a group of workers passes on of its ranks' output, and what it keeps."""

from __future__ import annotations

import io
import tracemalloc

from meshrun.api.worker_group import _Output
from meshrun.worker.call_channel import end_of_output


def test_long_sessions_take_no_more_memory() -> None:
    """Neither what was printed stays, nor anything of calls that were made."""
    shown = io.StringIO()
    output = _Output("stdout", shown)

    def call(number: int) -> None:
        for rank in range(2):
            output.write(f"[dp{rank}] {'x' * 1000}\n[dp{rank}] {end_of_output(number)}{rank}\n")
        output.wait_for(number, 2)
        assert shown.tell() == 2 * len(f"[dp0] {'x' * 1000}\n")
        shown.seek(0)
        shown.truncate()

    call(0)
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for number in range(1, 500):
            call(number)
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert after - before < 20_000


def test_what_is_kept_is_not_passed_on() -> None:
    """From then on, and no text before."""
    shown = io.StringIO()
    output = _Output("stderr", shown)
    output.write("before\nand aft")
    output.keep()
    output.write("er\n")
    output.close()

    assert (shown.getvalue(), output.kept) == ("before\n", "and after\n")
