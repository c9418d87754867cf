"""meshrun's own options: names, variable, help.

Texts stay texts here; ``asked`` reads them, so that each error is worded in one place.
"""

from __future__ import annotations

from typing import Annotated

from meshrun.cli.option_kinds import (
    FAIL,
    FILES,
    LOOK,
    MEET,
    MESH,
    NO_VALUE,
    RUN,
    SEE,
    SUBMIT,
    once,
    own,
)

Mesh = Annotated[
    str | None,
    own(
        "--mesh",
        metavar="SPEC",
        panel=MESH,
        text="Shape of the mesh: dp=2,tp=4 or 2x4. The right dim is fastest, as in torch."
        " One size may be -1, or a range such as 2:8.",
    ),
]
Names = Annotated[
    str | None,
    own("--names", metavar="A,B", panel=MESH, text="Names for the dims of a 2x4 mesh."),
]
Device = Annotated[
    str | None,
    own(
        "--device",
        metavar="TYPE",
        panel=MESH,
        text="auto, cpu, cuda or another torch device type. auto takes the accelerator where"
        " there are enough, else cpu.",
    ),
]
Flatten = Annotated[
    list[str] | None,
    own(
        "--flatten",
        metavar="[NAME=]A+B",
        panel=MESH,
        text="One dim over the ranks of several: dp_cp=dp+cp; repeatable.",
    ),
]
View = Annotated[
    list[str] | None,
    own(
        "--view",
        metavar="NAME:SPEC",
        panel=MESH,
        text="Another factorisation of the same ranks: moe:pp=2,efsdp=-1,ep=8; repeatable.",
    ),
]
IntraNode = Annotated[
    list[str] | None,
    own(
        "--intra-node",
        metavar="DIM[,DIM]",
        panel=MESH,
        text="Each group of these dims must lie within one node, all of them together.",
    ),
]
Place = Annotated[
    str | None,
    own(
        "--place",
        metavar="contiguous|auto",
        panel=MESH,
        text="How ranks are numbered: node by node, or so that --intra-node holds.",
    ),
]
Backend = Annotated[
    list[str] | None,
    own(
        "--backend",
        metavar="[DIM=]NAME",
        panel=MESH,
        text="Back end of the groups of all dims, or of one: tp=nccl; repeatable.",
    ),
]
Timeout = Annotated[
    list[str] | None,
    own(
        "--timeout",
        metavar="[DIM=]TIME",
        panel=MESH,
        text="How long a collective may take: 15m for every group, tp=90s for a dim's; repeatable.",
    ),
]
PgOpt = Annotated[
    list[str] | None,
    own(
        "--pg-opt",
        metavar="DIM:K=V",
        panel=MESH,
        text="An option of the back end: tp:is_high_priority_stream=1; repeatable.",
    ),
]
MeshInit = Annotated[
    str | None,
    own(
        "--mesh-init",
        metavar="eager|lazy",
        panel=MESH,
        text="Build the mesh before the program's first line, or at the first current_mesh().",
    ),
]
DryRun = Annotated[
    bool,
    own(
        "--dry-run",
        "-n",
        metavar=NO_VALUE,
        panel=LOOK,
        text="Print who sits where and start nothing.",
    ),
]
Format = Annotated[
    str | None,
    own(
        "--format",
        metavar="text|json|svg",
        panel=LOOK,
        text="How a dry run is printed; svg is a picture.",
    ),
]
Output = Annotated[
    str | None,
    own(
        "--output",
        "-o",
        metavar="FILE",
        panel=LOOK,
        text="Write the dry run to FILE, whole or not at all.",
    ),
]
Submit = Annotated[
    str | None,
    once(
        "--submit",
        metavar="SCHEDULER",
        panel=SUBMIT,
        text="Hand this launch in as a job: slurm, kubernetes, jobset or trainjob. With --dry-run,"
        " print what would be handed in.",
    ),
]
Image = Annotated[
    str | None,
    own(
        "--image",
        metavar="NAME",
        panel=SUBMIT,
        text="The container image that Kubernetes runs, with torch, meshrun and the program.",
    ),
]
SubmitArg = Annotated[
    list[str] | None,
    own(
        "--submit-arg",
        metavar="ARG",
        panel=SUBMIT,
        text="An option for the scheduler, such as --partition=gpu for sbatch; repeatable.",
    ),
]
ColorDim = Annotated[
    str | None,
    own(
        "--color-dim",
        metavar="DIM",
        panel=LOOK,
        text="The dim that colours the ranks of a picture; the slowest if left out.",
    ),
]
Rank = Annotated[
    str | None,
    own(
        "--rank",
        metavar="WHICH",
        panel=LOOK,
        text="Print all about one rank instead: 5, or dp=1,tp=1.",
    ),
]
All = Annotated[
    bool, own("--all", metavar=NO_VALUE, panel=LOOK, text="Print every worker of a large plan.")
]
Timings = Annotated[
    bool, own("--timings", metavar=NO_VALUE, panel=LOOK, text="Say at the end where the time went.")
]
Verbose = Annotated[
    bool,
    own(
        "--verbose",
        "-v",
        metavar=NO_VALUE,
        panel=LOOK,
        text="Say at the start what listens, where and why.",
    ),
]
Preload = Annotated[
    list[str] | None,
    own(
        "--preload",
        metavar="MODULE",
        panel=RUN,
        text="Import this once a node too, before the ranks are forked; repeatable.",
    ),
]
Show = Annotated[
    list[str] | None,
    own(
        "--show",
        metavar="WHERE",
        panel=SEE,
        text="Print only these ranks: dp=0, tp=1-3 or rank=0,3; repeatable. Files keep all.",
    ),
]
Hide = Annotated[
    list[str] | None,
    own("--hide", metavar="WHERE", panel=SEE, text="Print all but these ranks; repeatable."),
]
Collapse = Annotated[
    bool,
    own(
        "--collapse",
        metavar=NO_VALUE,
        panel=SEE,
        text="Print a line that several ranks print alike once.",
    ),
]
Prefix = Annotated[
    str | None,
    own(
        "--prefix",
        metavar="WHAT",
        panel=SEE,
        text="What stands before ranks' lines: mesh for coordinates, torchrun for what it has"
        " there, or none.",
    ),
]
NoPrefix = Annotated[
    bool,
    own(
        "--no-prefix",
        metavar=NO_VALUE,
        panel=SEE,
        text="The same as --prefix none.",
    ),
]
Console = Annotated[
    str | None,
    own(
        "--console",
        metavar="all|first-node",
        panel=SEE,
        text="Where there are several, the nodes that print lines of their ranks.",
    ),
]
StartTimeout = Annotated[
    str | None,
    own(
        "--start-timeout",
        metavar="TIME",
        panel=FAIL,
        text="Say where each rank is if the start takes longer; 300, and 0 for never.",
    ),
]
NodeTimeout = Annotated[
    str | None,
    own(
        "--node-timeout",
        metavar="TIME",
        panel=FAIL,
        text="End or restart ranks if another node is silent for so long; 30 if left out.",
    ),
]
HangTimeout = Annotated[
    str | None,
    own(
        "--hang-timeout",
        metavar="TIME",
        panel=FAIL,
        text="End or restart ranks if none uses its CPU, prints or calls heartbeat() for so long.",
    ),
]
Forward = Annotated[
    str | None,
    own(
        "--forward",
        metavar="USR1,..",
        panel=FAIL,
        text="Signals that are passed to the ranks, and end nothing.",
    ),
]
ExitCode = Annotated[
    str | None,
    own(
        "--exit-code",
        metavar="worker|torchrun",
        panel=FAIL,
        text="The failed rank's own exit code, or 1 for any failure.",
    ),
]
Status = Annotated[
    bool,
    own(
        "--status",
        metavar=NO_VALUE,
        panel=SEE,
        text="Show each rank's state, CPU and memory: below the lines of a terminal, or as lines.",
    ),
]
StatusInterval = Annotated[
    str | None,
    own(
        "--status-interval",
        metavar="TIME",
        panel=SEE,
        text="How often: 1 on a terminal, else 30.",
    ),
]
DebugRank = Annotated[
    str | None,
    own(
        "--debug-rank",
        metavar="WHICH",
        panel=SEE,
        text="Give this rank the terminal, for breakpoint(); the others wait: 3, or dp=0,tp=3.",
    ),
]
Report = Annotated[
    str | None,
    own("--report", metavar="FILE", panel=FAIL, text="Write what came of it to FILE, as JSON."),
]
AllowDifferentPrograms = Annotated[
    bool,
    own(
        "--allow-different-programs",
        metavar=NO_VALUE,
        panel=MEET,
        text="Nodes may run different files, or the same with other arguments.",
    ),
]
AllowSharedLogDir = Annotated[
    bool,
    own(
        "--allow-shared-log-dir",
        metavar=NO_VALUE,
        panel=FILES,
        text="Others may write to where --log-dir is.",
    ),
]
