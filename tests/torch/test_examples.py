"""The examples print what follows from their mesh, and their models learn."""

import importlib.util
import re
import shutil
from pathlib import Path

import pytest

from meshrun import Layout
from tests.engines.hosts import MakeHosts
from tests.engines.together import end_all, launch_on
from tests.kit import ROOT, lines_of, run_meshrun
from tests.variations import ordinary

pytestmark = pytest.mark.torch
EXAMPLES = ROOT / "examples"


def run(mesh: str, program: str, *args: str | Path) -> str:
    """Return what an example prints on the mesh in its docstring; stderr must be empty."""
    assert f"    meshrun --mesh {mesh} examples/{program}" in (EXAMPLES / program).read_text()
    ours = run_meshrun("--mesh", mesh, "--device", "cpu", EXAMPLES / program, *args)
    assert (ours.returncode, ours.stderr) == (0, "")
    return ours.stdout


def by_rank(mesh: str, printed: str) -> list[list[str]]:
    """Return each rank's lines, by rank."""
    layout = Layout.parse(mesh)
    places = [layout.coordinate(rank) for rank in range(layout.world_size)]
    labels = [
        " ".join(f"{dim}{index}" for dim, index in zip(layout.mesh_dim_names, place, strict=True))
        if layout.mesh_dim_names
        else ",".join(map(str, place))
        for place in places
    ]
    found = lines_of(printed, labels)
    return [found[label] for label in labels]


@pytest.mark.parametrize(
    ("mesh", "columns", "rows"),
    ordinary(
        [
            ("2x3", [[0, 3], [1, 4], [2, 5]], [[0, 1, 2], [3, 4, 5]]),
            ("3x2", [[0, 2, 4], [1, 3, 5]], [[0, 1], [2, 3], [4, 5]]),
            (
                "replicate=2,shard=4",
                [[0, 4], [1, 5], [2, 6], [3, 7]],
                [[0, 1, 2, 3], [4, 5, 6, 7]],
            ),
        ],
        "2x3",
    ),
)
def test_each_rank_finds_its_groups(
    mesh: str, columns: list[list[int]], rows: list[list[int]]
) -> None:
    """The first dim's groups are the columns of the mesh, the second's are its rows."""
    found = by_rank(mesh, run(mesh, "groups.py"))
    first, second = re.findall(r"([a-z]+)=", mesh) or ("dim 0", "dim 1")

    for rank, lines in enumerate(found):
        (column,) = [group for group in columns if rank in group]
        (row,) = [group for group in rows if rank in group]
        assert lines == [f"rank {rank}: {first} {column}, {second} {row}"]


@pytest.mark.parametrize(("workers", "fits"), [(4, "2x2"), (8, "2x4")])
def test_a_mesh_that_does_not_fit_starts_nothing(workers: int, fits: str, tmp_path: Path) -> None:
    """Too few or too many workers are an error before any rank starts."""
    program = tmp_path / "leave_trace.py"
    program.write_text(f"open({str(tmp_path / 'trace')!r}, 'w')\n")

    asked = ("--mesh", "2x3", "--nproc-per-node", str(workers), "--device", "cpu")
    ours = run_meshrun(*asked, program)

    assert (ours.returncode, ours.stdout) == (2, "")
    assert ours.stderr.splitlines() == [
        "error: mesh `2x3` needs 6 workers (2 x 3),"
        f" but 1 node x {workers} workers gives {workers}",
        "",
        f"hint: use `{fits}` for {workers} workers, or --nproc-per-node 6 for 6",
    ]
    assert list(tmp_path.iterdir()) == [program]


@pytest.mark.nightly
def test_slices_of_three_dims() -> None:
    """Two of three dims form a sub-mesh, and a weight is sharded by `tp`, then by `shard`."""
    mesh = "replicate=2,shard=2,tp=2"
    found = by_rank(mesh, run(mesh, "slices.py"))

    assert found[3][0] == (
        "rank 3 is in hsdp [[1, 3], [5, 7]], replicate [3, 7], shard [1, 3], tp [2, 3]"
    )
    for rank, lines in enumerate(found):
        replicate, shard, tp = rank // 4, rank // 2 % 2, rank % 2
        hsdp = [[tp, tp + 2], [tp + 4, tp + 6]]
        copies = [rank % 4, rank % 4 + 4]
        first = 4.0 * tp + 2 * shard
        assert lines == [
            f"rank {rank} is in hsdp {hsdp}, replicate {copies}, shard {hsdp[replicate]},"
            f" tp {[rank - tp, rank - tp + 1]}",
            f"rank {rank} keeps {[first, first + 1]}",
        ]


@pytest.mark.nightly
def test_hsdp_shards_are_equal_on_both_replicas() -> None:
    """Four shards of 25; a step with the average of the gradients 0 to 7 moves all by 3.5."""
    mesh = "replicate=2,shard=4"
    for rank, lines in enumerate(by_rank(mesh, run(mesh, "shards_hsdp.py"))):
        first = 101 + 25 * (rank % 4)
        average = sum(range(8)) / 8
        assert lines == [
            f"holds 25 weights, {first:.1f} to {first + 24:.1f}",
            f"after a step 25 weights, {first - average:.1f} to {first + 24 - average:.1f}",
        ]


@pytest.mark.nightly
def test_fsdp_averages_along_its_own_dim_only() -> None:
    """Gradients differ between rows of the mesh until the program averages them over `dp`."""
    mesh = "dp=2,fsdp=4"
    for rank, lines in enumerate(by_rank(mesh, run(mesh, "shards_fsdp_dp.py"))):
        first = 101 + 25 * (rank % 4)
        row = range(rank // 4 * 4, rank // 4 * 4 + 4)
        assert lines == [
            f"holds 25 weights, {first} to {first + 24}",
            f"part {rank} of 8: gradient [{sum(row) / 4}], over dp [{sum(range(8)) / 8}]",
        ]


@pytest.mark.nightly
def test_fsdp_and_tp_shard_a_weight_in_order() -> None:
    """`tp` gives each rank 36 weights, `fsdp` halves them by rows; full_tensor() is in order."""
    mesh = "fsdp=2,tp=4"
    for rank, lines in enumerate(by_rank(mesh, run(mesh, "shards_fsdp_tp.py"))):
        start, fsdp = 101 + 36 * (rank % 4), rank // 4
        square = (start + 24, start + 35) if fsdp else (start, start + 23)
        first = start + 18 * fsdp
        whole = ["full_tensor() is 101 to 244 in order, twice"] if rank == 0 else []
        assert lines == [
            f"12x12: {square[1] - square[0] + 1} weights, {square[0]} to {square[1]}",
            f"24x6: 18 weights, {first} to {first + 17}",
            *whole,
        ]


@pytest.mark.nightly
def test_images_are_learned_and_training_continues_on_another_mesh(tmp_path: Path) -> None:
    """Four ranks continue from a checkpoint of two, with the same results."""
    pattern = r"\[dp0\] epoch (\d): (?:loss ([\d.]+), )?accuracy ([\d.]+)%"
    whole = re.findall(pattern, run("dp=2", "images.py", tmp_path, "2"))
    shutil.rmtree(tmp_path / "2")
    rest = re.findall(pattern, run("dp=4", "images.py", tmp_path, "2"))

    assert [epoch for epoch, _, _ in whole + rest] == ["0", "1", "2", "1", "2"]
    losses = [float(loss) for _, loss, _ in (whole[1], whole[2], rest[1])]
    accuracies = [float(accuracy) for _, _, accuracy in whole + rest]
    assert accuracies[0] < 30
    assert min(accuracies[1:]) > 90
    assert accuracies[3:] == pytest.approx(accuracies[1:3], abs=0.5)
    assert losses[1] < losses[0] / 5
    assert losses[2] == pytest.approx(losses[1], abs=5e-4)


@pytest.mark.nightly
def test_a_pipeline_learns_the_same_on_any_mesh() -> None:
    """Stages send to their neighbors, and pp x dp x tp has the same losses as pp alone."""
    cut, staged = "pp=2,dp=2,tp=2", "pp=4,dp=1,tp=1"
    found = by_rank(cut, run(cut, "pipeline.py"))
    others = by_rank(staged, run(staged, "pipeline.py"))

    for rank, lines in enumerate(found):
        stage, dp, tp = rank // 4, rank // 2 % 2, rank % 2
        first = 4 * stage
        source, target = (f"rank {rank - 4}", "loss") if stage else ("data", f"rank {rank + 4}")
        assert lines[0] == (
            f"{source} -> stage {stage} -> {target},"
            f" stage [[{first}, {first + 1}], [{first + 2}, {first + 3}]],"
            f" dp [{first + tp}, {first + tp + 2}], tp {[first + 2 * dp, first + 2 * dp + 1]}"
        )
    assert found[0][1:] == [
        f"rank {rank} is at Coordinate(pp={rank // 4}, dp={rank // 2 % 2}, tp={rank % 2})"
        for rank in range(8)
    ]
    losses = [float(line.split()[-1]) for line in found[4][1:]]
    assert losses[-1] < losses[0] / 5
    assert [float(line.split()[-1]) for line in others[3][1:]] == pytest.approx(losses, abs=1e-3)


def test_the_table_has_the_command_of_each_example() -> None:
    """The table in examples/README.md links every program, with the first command in it."""
    text = (EXAMPLES / "README.md").read_text()
    rows = dict(re.findall(r"^\| \[(\S+)\]\(\1\) \| `([^`]+)` \|", text, re.MULTILINE))
    commands = {
        path.name: re.findall(r"^    (meshrun .+)$", path.read_text(), re.MULTILINE)[0]
        for path in EXAMPLES.glob("*.py")
    }

    assert rows == commands


@pytest.mark.parametrize("experts", ordinary([2, 1, 4], 2))
def test_experts_learn_the_same_on_any_number_of_ranks(experts: int) -> None:
    """The loss depends only on the step, not on which rank has which expert."""
    program = EXAMPLES / "experts.py"
    mesh = ("--mesh", "dp=4", "--view", f"moe:edp=-1,ep={experts}")
    ours = run_meshrun(*mesh, "--device", "cpu", "--no-prefix", program)
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", ours.stdout)]

    assert (ours.returncode, ours.stderr) == (0, "")
    assert losses == pytest.approx([0.6924, 0.6099, 0.5788, 0.4819], abs=1e-3)


@pytest.mark.nightly
def test_parts_of_a_sequence_are_attended_to_as_the_whole() -> None:
    """The program compares outputs and gradients."""
    found = by_rank("dp=2,cp=2", run("dp=2,cp=2", "context.py"))
    halves = [[f"tokens {half} match the whole sequence"] for half in ("0 to 15", "16 to 31")]

    assert found == halves * 2


@pytest.mark.nightly
def test_replicas_answer_as_one_rank_would() -> None:
    """The program compares them; one rank prints the answers to all prompts."""
    first, *others = by_rank("replica=2,tp=2", run("replica=2,tp=2", "inference.py"))

    assert [line.partition(" -> ")[0] for line in first] == [
        "a", "bad", "cab", "deaf", "e", "feed", "gag",
    ]  # fmt: skip
    assert others == [[], [], []]


@pytest.mark.nightly
@pytest.mark.integrations
@pytest.mark.parametrize("library", ["lightning", "accelerate", "transformers"])
def test_a_library_s_example_learns(library: str) -> None:
    """On two ranks, one of which prints the loss."""
    if importlib.util.find_spec(library) is None:
        pytest.skip("needs the extra `integrations`")
    name = {"transformers": "transformers_finetune.py"}.get(library, f"{library}_ddp.py")
    ours = run_meshrun(
        "--mesh", "dp=2", "--device", "cpu", EXAMPLES / name, env={"HF_HUB_OFFLINE": "1"}
    )
    losses = [float(loss) for loss in re.findall(r"\[dp0\] step +\d+  loss ([\d.]+)", ours.stdout)]

    assert ours.returncode == 0, ours.stderr
    assert losses[-1] < losses[0] / 5


@pytest.mark.nightly
@pytest.mark.integrations
def test_the_lightning_example_learns_on_several_nodes(make_hosts: MakeHosts) -> None:
    """Lightning checks that its devices and nodes multiply to the world size."""
    pytest.importorskip("lightning", reason="needs the extra `integrations`")
    hosts = make_hosts(2)
    launches = launch_on(
        hosts, "--nnodes", "2", "--rdzv-endpoint", "node0:29500", "--mesh", "dp=2",
        EXAMPLES / "lightning_ddp.py",
    )  # fmt: skip

    assert end_all(launches) == [0, 0], launches[0].text
    losses = re.findall(r"\[dp0\] step +\d+  loss ([\d.]+)", launches[0].text)
    assert float(losses[-1]) < float(losses[0]) / 5
