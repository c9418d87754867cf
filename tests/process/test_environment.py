"""What ranks find in their environment."""

import os
from pathlib import Path

import pytest

from meshrun.host.own_variables import BETWEEN_LAUNCHERS
from meshrun.host.rank_variables import GENERATION, OF_LAYOUT
from tests.kit import PROGRAMS, environments, run_meshrun


@pytest.mark.parametrize("method", ["fork", "exec"])
def test_ranks_get_their_numbers(method: str, fake_torch: object) -> None:
    """Each rank has its own, and all have the same store."""
    found = environments("--nproc-per-node", "3", "--start-method", method)

    assert [(env["RANK"], env["LOCAL_RANK"], env["WORLD_SIZE"]) for env in found] == [
        (str(rank), str(rank), "3") for rank in range(3)
    ]
    assert {env["MASTER_ADDR"] for env in found} == {"127.0.0.1"}
    assert len({env["MASTER_PORT"] for env in found}) == 1
    assert len({env["MESHRUN_WORKER_PID"] for env in found}) == 3
    assert len({env["TORCHELASTIC_RUN_ID"] for env in found}) == 1


def test_a_role_may_be_empty(fake_torch: object) -> None:
    """TorchX passes `--role ''`; an empty variable is as good as none."""
    assert environments("--role", "")[0]["ROLE_NAME"] == ""
    assert environments(env={"PET_ROLE": ""})[0]["ROLE_NAME"] == "default"


@pytest.mark.parametrize("method", ["fork", "exec"])
@pytest.mark.parametrize("given", [{}, {"OMP_NUM_THREADS": "3", "OPENBLAS_NUM_THREADS": "2"}])
def test_thread_variables_are_the_users_or_the_plans(
    method: str, given: dict[str, str], fake_torch: object
) -> None:
    """The zygote imports torch with one thread; ranks do not see that setting."""
    found = environments("--nproc-per-node", "2", "--start-method", method, env=given)
    threads = str(max(1, len(os.sched_getaffinity(0)) // 2))

    for env in found:
        assert env["OMP_NUM_THREADS"] == given.get("OMP_NUM_THREADS", threads)
        assert env.get("OPENBLAS_NUM_THREADS") == given.get("OPENBLAS_NUM_THREADS")


def test_the_environment_of_the_launcher_is_passed_on(fake_torch: object) -> None:
    """A launch inside a rank of another launch overrides the outer one's variables.

    What processes of the outer one told each other is gone; ``MESHRUN_SERVE`` would make ranks
    serve calls.
    """
    outer = {"RANK": "5", "WORLD_SIZE": "9", "MESHRUN_WORKER_PID": "1", "MY_TOKEN": "secret value"}
    outer[GENERATION] = "1"
    theirs = dict.fromkeys({*BETWEEN_LAUNCHERS, *OF_LAYOUT}, "left over")
    found = environments("--nproc-per-node", "2", env={**theirs, **outer})

    assert [env["RANK"] for env in found] == ["0", "1"]
    assert all(env["MY_TOKEN"] == "secret value" for env in found)
    assert all(env["MESHRUN_WORKER_PID"] != "1" for env in found)
    assert all("left over" not in env.values() for env in found)


@pytest.mark.parametrize("threads", ["\u00b2", "9" * 30, "many", "0", "-1"])
def test_an_invalid_number_of_threads_is_left_to_openmp(threads: str, fake_torch: object) -> None:
    """OpenMP ignores it, and so does the rank."""
    (found,) = environments(env={"OMP_NUM_THREADS": threads})

    assert found["OMP_NUM_THREADS"] == threads


@pytest.mark.parametrize("options", [[], ["--start-method", "exec"], ["--warm"]], ids=" ".join)
def test_warnings_may_be_errors(options: list[str], fake_torch: object, tmp_path: Path) -> None:
    """Also the one for text files whose encoding depends on the locale."""
    words = ("--log-dir", tmp_path / "logs", "--tee", "3", "--report", tmp_path / "report")
    env = {
        "PYTHONWARNINGS": "error",
        "PYTHONWARNDEFAULTENCODING": "1",
        "XDG_RUNTIME_DIR": str(tmp_path),
    }
    ours = run_meshrun(*options, *words, PROGRAMS / "environment.py", env=env)

    assert (ours.returncode, "Warning" in ours.stderr) == (0, False), ours.stderr
    assert run_meshrun("--warm-stop", env=env).returncode == 0
