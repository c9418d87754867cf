"""Cells of a notebook on persistent ranks."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

CELLS = """
import os

from IPython.core.interactiveshell import InteractiveShell

shell = InteractiveShell.instance(colors="nocolor")
shell.run_line_magic("load_ext", "meshrun")


def run(cell):
    print("~~~", flush=True)
    print("ran" if shell.run_cell(cell).success else "failed", flush=True)


run("%mesh")
run("%%mesh dp=2 --device cpu\\nimport torch, torch.distributed as dist\\nx = torch.ones(1)")
run("%%mesh\\ndist.all_reduce(x)\\nprint('on', dist.get_rank())\\nx.item()")
run("%%mesh\\ndef f(n: int): return 1 / n\\nf(x.item() - 2)")
run("%%mesh\\nassert f.__annotations__['n'] is int\\nx.item() + dist.get_rank()")
run("%%mesh\\n1 +")
run("%%mesh\\nif hasattr(__builtins__, 'ExceptionGroup'): raise ExceptionGroup('g', [KeyError(1)])")
run("%mesh")
run("%%mesh dp=2  --device cpu --show dp=0\\nimport os, time; os.system('echo native')\\nx.item()")
run("%%mesh --hide dp=2\\n1")
run("%%mesh\\nimport asyncio\\nasync def twice(): return 2 * x.item()\\n"
    "task = asyncio.create_task(twice())\\nawait task")
run("%%mesh\\n!echo {x.item()} of {x.ndim}\\nlines = !echo a; echo b; exit 3\\nlines, _exit_code")
run("%%mesh\\n%timeit 1")
run(
    "%%mesh\\ndist.barrier()\\n"
    f"dist.get_rank() or os.kill({os.getpid()}, 2)\\nwhile 1: time.sleep(0.01)"
)
run("%%mesh\\nif dist.get_rank(): f(0)\\ndist.barrier()")
run("%%mesh\\n'x' in globals()")
run("%%mesh dp=2 --devise cpu\\n1")
run("%%mesh dp=2 \'\\n1")
run("%%mesh dp=2 tp=1\\n1")
run("%mesh")
run("%%mesh dp=2 --device cpu --collapse\\n'dist' in globals()")
run("%mesh stop")
run("%%mesh dp=x\\n1")
run("%mesh what")
"""


@pytest.mark.torch
def test_cells_run_on_ranks_that_stay(tmp_path: Path) -> None:
    """Values by coordinate, tracebacks with the cell's frames only; lost ranks are replaced."""
    ran = subprocess.run(
        [sys.executable, "-c", CELLS],
        cwd=tmp_path,
        env={**os.environ, "IPYTHONDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    parts = [part.strip().splitlines() for part in ran.stdout.split("~~~\n")[1:]]
    none, begin, total, wrong, after, syntax, several, known, *parts = parts
    shown, no_index, awaited, commands, magic, stopped, *parts = parts
    lost, fresh, *slips, others, stop, bad, word = parts

    assert none == ["no ranks", "ran"]
    assert begin == ["ran"]
    assert sorted(total[:2]) == ["[dp0] on 0", "[dp1] on 1"]
    assert total[2:] == ["[all] 2.0", "ran"]
    assert re.search("ZeroDivisionError: (float )?division by zero", "\n".join(wrong))
    assert "return 1 / n" in "\n".join(wrong)
    assert not any("meshrun/" in line for line in wrong), wrong
    assert after == ["[dp0] 2.0", "[dp1] 3.0", "ran"]
    assert "SyntaxError" in "\n".join(syntax)
    assert not any("meshrun/" in line for line in syntax), syntax
    if sys.version_info >= (3, 11):
        assert "ExceptionGroup: g (1 sub-exception)" in "\n".join(several)
        assert "meshrun/" not in ran.stderr
    assert known == ["dp=2 --device cpu: 2 ranks", "ran"]
    assert shown == ["[dp0] native", "[dp0] 2.0", "ran"]
    assert no_index[0] == "error: dim `dp` has no index 2: its size is 2"
    assert no_index[1].strip() == "--hide dp=2"
    assert awaited == ["[all] 4.0", "ran"]
    assert sorted(commands[:2]) == [f"[dp{rank}] 2.0 of 1" for rank in (0, 1)]
    assert commands[2:] == ["[all] (['a', 'b'], 3)", "ran"]
    assert magic[0].startswith("error: %%mesh: `%timeit` is a command of IPython")
    assert stopped == ["KeyboardInterrupt", "failed"]
    assert "dp1 failed; not finished: dp0" in lost
    assert lost[-1] == "failed"
    assert "new ranks start with the next input" in ran.stderr
    assert fresh == ["[all] False", "ran"]
    assert "did you mean `--device`" in "\n".join(slips[0])
    assert slips[1][0].startswith("error: %%mesh cannot read `dp=2 '`")
    assert slips[2][0] == "error: options: `tp=1` is neither an option nor the value of one"
    assert slips[3] == known, "a typo must not lose the ranks"
    assert others == ["[all] False", "ran"]
    message = "`dp=2 --device cpu --collapse` needs different ranks than `dp=2 --device cpu`; "
    assert message in ran.stderr
    assert stop == ["ran"]
    assert bad[0].startswith("error: `x` is not a size")
    assert word[0] == "error: %mesh takes only `stop`, found `what`"
