"""torchrun's options: names, variable, help.

Texts stay texts here; ``asked`` reads them, so that each error is worded in one place.
"""

from __future__ import annotations

from typing import Annotated

from meshrun.cli.option_kinds import (
    ACCEPTED,
    FAIL,
    FILES,
    MEET,
    NO_VALUE,
    RUN,
    SEE,
    WORKERS,
    once,
    torchrun,
)

Module = Annotated[
    bool,
    torchrun(
        "-m", "--module", metavar=NO_VALUE, panel=RUN, text="Run a module, as python -m does."
    ),
]
NoPython = Annotated[
    bool,
    torchrun(
        "--no-python",
        metavar=NO_VALUE,
        panel=RUN,
        text="Run any command, without Python before it.",
    ),
]
RunPath = Annotated[
    bool,
    torchrun(
        "--run-path",
        metavar=NO_VALUE,
        panel=RUN,
        text="Run the script with no new interpreter: the default.",
    ),
]
StartMethod = Annotated[
    str | None,
    torchrun(
        "--start-method",
        metavar="fork|exec",
        panel=RUN,
        text="fork imports torch once a node; exec gives each rank a fresh interpreter.",
    ),
]
Nproc = Annotated[
    str | None,
    torchrun(
        "--nproc-per-node",
        metavar="N",
        panel=WORKERS,
        text="Workers on each node: a number, auto, gpu, cpu or xpu; 8,4 where nodes differ. As"
        " many as the mesh needs if left out.",
    ),
]
Nnodes = Annotated[
    str | None,
    torchrun("--nnodes", metavar="N", panel=WORKERS, text="Number of nodes or MIN:MAX; else 1."),
]
NumaBinding = Annotated[
    str | None,
    torchrun(
        "--numa-binding",
        metavar="MODE",
        panel=WORKERS,
        text="Keep each rank on the cores near its device: node, socket, exclusive or"
        " core-complex.",
    ),
]
VirtualLocalRank = Annotated[
    bool,
    torchrun(
        "--virtual-local-rank",
        metavar=NO_VALUE,
        panel=WORKERS,
        text="Each rank sees one device, as device 0, and LOCAL_RANK=0.",
    ),
]
Role = Annotated[
    str | None,
    torchrun("--role", metavar="NAME", panel=WORKERS, text="The workers' ROLE_NAME."),
]
Template = Annotated[
    str | None,
    torchrun(
        "--log-line-prefix-template",
        metavar="TEXT",
        panel=SEE,
        text=r"What to print before a line, with ${rank}, ${local_rank}, ${role_name},"
        r" ${hostname}, ${coordinate} and ${time} filled in.",
    ),
]
LocalRanksFilter = Annotated[
    str | None,
    torchrun(
        "--local-ranks-filter", metavar="0,2", panel=SEE, text="Print only these local ranks."
    ),
]
LogDir = Annotated[
    str | None,
    torchrun("--log-dir", metavar="DIR", panel=FILES, text="Where log files go."),
]
Redirects = Annotated[
    str | None,
    torchrun(
        "-r",
        "--redirects",
        metavar="STREAMS",
        panel=FILES,
        text="To files alone: 1 stdout, 2 stderr, 3 both; 0-3:1,4:3 by local rank.",
    ),
]
Tee = Annotated[
    str | None,
    torchrun("-t", "--tee", metavar="STREAMS", panel=FILES, text="To files, and printed as well."),
]
StdoutFilters = Annotated[
    str | None,
    torchrun(
        "--duplicate-stdout-filters",
        metavar="A,B",
        panel=FILES,
        text="Copy lines of teed stdout that have A or B in them to filtered_stdout.log.",
    ),
]
StderrFilters = Annotated[
    str | None,
    torchrun("--duplicate-stderr-filters", metavar="A,B", panel=FILES, text="The same for stderr."),
]
LogsSpecs = Annotated[
    str | None,
    torchrun(
        "--logs-specs",
        metavar="NAME",
        panel=FILES,
        text="A plug-in that chooses the files (entry points torchrun.logs_specs).",
    ),
]
EventHandler = Annotated[
    str | None,
    torchrun(
        "--event-log-handler",
        metavar="NAME",
        panel=FILES,
        text="Where torch-elastic's events go: null, console, or a plug-in.",
    ),
]
ShutdownTimeout = Annotated[
    str | None,
    torchrun(
        "--shutdown-timeout",
        metavar="TIME",
        panel=FAIL,
        text="How long ranks may take to end once they are told to; 30 if left out.",
    ),
]
MaxRestarts = Annotated[
    str | None,
    torchrun(
        "--max-restarts",
        metavar="N",
        panel=FAIL,
        text="How often all ranks are started again after one fails.",
    ),
]
SignalsToHandle = Annotated[
    str | None,
    torchrun(
        "--signals-to-handle",
        metavar="A,B",
        panel=FAIL,
        text="Signals that are passed to the ranks and end the launch.",
    ),
]
Standalone = Annotated[
    bool,
    torchrun("--standalone", metavar=NO_VALUE, panel=MEET, text="This node alone, on a free port."),
]
RdzvBackend = Annotated[
    str | None,
    torchrun("--rdzv-backend", metavar="NAME", panel=MEET, text="static, c10d, or a plug-in."),
]
RdzvEndpoint = Annotated[
    str | None,
    torchrun("--rdzv-endpoint", metavar="HOST:PORT", panel=MEET, text="Where nodes meet."),
]
RdzvId = Annotated[
    str | None, torchrun("--rdzv-id", metavar="ID", panel=MEET, text="Name of this launch.")
]
RdzvConf = Annotated[
    str | None, torchrun("--rdzv-conf", metavar="K=V,K=V", panel=MEET, text="Its settings.")
]
NodeRank = Annotated[
    str | None, torchrun("--node-rank", metavar="N", panel=MEET, text="Which node this is.")
]
MasterAddr = Annotated[
    str | None,
    torchrun("--master-addr", metavar="HOST", panel=MEET, text="Address of the first node."),
]
MasterPort = Annotated[
    str | None, torchrun("--master-port", metavar="PORT", panel=MEET, text="Its port.")
]
LocalAddr = Annotated[
    str | None,
    torchrun("--local-addr", metavar="HOST", panel=MEET, text="Address of this node."),
]
MonitorInterval = Annotated[
    str | None,
    torchrun(
        "--monitor-interval",
        metavar="TIME",
        panel=ACCEPTED,
        text="meshrun waits for events and polls nothing.",
    ),
]
ExitBarrierTimeout = Annotated[
    str | None,
    torchrun(
        "--exit-barrier-timeout",
        metavar="TIME",
        panel=ACCEPTED,
        text="meshrun has no barrier at the end.",
    ),
]
PrintCompletion = Annotated[
    str | None,
    once(
        "--print-completion",
        metavar="SHELL",
        panel=None,
        text="Print a completion script for bash, zsh, fish or tcsh.",
    ),
]
