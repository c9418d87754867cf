"""This node's link to the others: it joins them, reports, passes on decisions, and withdraws."""

from __future__ import annotations

import hmac
import os
import secrets
from collections.abc import Callable, Mapping
from functools import partial
from importlib.metadata import PackageNotFoundError, version

from msgspec import Struct
from msgspec.structs import asdict, replace

from meshrun import __version__
from meshrun.errors import RendezvousError
from meshrun.host.nvml import ask_driver, read_driver_version
from meshrun.host.printable import Mask
from meshrun.host.reactor import Reactor
from meshrun.layout import Layout, format_derived
from meshrun.layout.spec import format_mesh
from meshrun.lifecycle.actions import Decide, Report
from meshrun.lifecycle.outcome import describe_end, node_outcome, why_stopped
from meshrun.lifecycle.root_cause import describe_lost_process
from meshrun.lifecycle.state import State
from meshrun.plan.group_options import format_group_options
from meshrun.plan.parse import format_nnodes
from meshrun.plan.plan import LaunchPlan
from meshrun.plan.rank_program import Program
from meshrun.plan.rendezvous_config import RendezvousConfig
from meshrun.protocol.collectives import RankCalled
from meshrun.protocol.events import LaunchOver, NextBegins
from meshrun.protocol.generation import Cause, Evidence, Withdraw
from meshrun.protocol.zygote_messages import Negotiate
from meshrun.rendezvous.expected_nodes import PROGRAM, PROGRAM_FILE
from meshrun.rendezvous.hub import Hub
from meshrun.rendezvous.membership import fit_nodes
from meshrun.rendezvous.messages import Cleared, Failed, Finished, Join, Leave
from meshrun.rendezvous.node_assigner import addresses_to_name
from meshrun.rendezvous.peers import Peers
from meshrun.rendezvous.secret import find_secret, read_secret, secret_warnings
from meshrun.rendezvous.this_node import ThisNode
from meshrun.supervisor.program_file import digest_program
from meshrun.wording import count, flag_of

_SIGNALLED_LINGER_S = 1.0
_SILENT_LINGER_S = 1.0
"""How long a node lingers before it prints a note."""
_IMPORT_TAKES_S = 60.0
"""How long importing torch may take, where it is needed to notify the others."""
_LOOK_EVERY_S = 0.3
"""A callback at the end of the import would have to pass through three modules."""
_CHECK_DELIVERY_S = 0.01
_MOST_ARGUMENTS = 200
"""Arguments of a program that are compared one by one."""
_SHOWN = 80
"""Characters of an argument that an error shows."""


class RendezvousAccess(Struct, frozen=True):
    """Where this node meets the others, and what only launchers of this launch know."""

    config: RendezvousConfig
    secret: bytes


def prepare_rendezvous(config: RendezvousConfig) -> RendezvousAccess:
    """Return what can be known before anything starts.

    Raises:
        HostError: If the secret's file cannot be read.
    """
    secret = find_secret(os.environ, config)
    return RendezvousAccess(
        replace(config, is_secret=bool(read_secret(os.environ, config))), secret
    )


class Linger:
    """The time in which a node that withdraws waits for the others, to notify them.

    A participant in ``ParticipantPhase.LINGERING`` waits for node 0 instead, which reports first.
    """

    def __init__(
        self,
        peers: Peers,
        reason: str,
        linger_s: float,
        note: Callable[[str], None],
        reactor: Reactor,
    ) -> None:
        self._peers, self._note, self._linger_s = peers, note, linger_s
        self._text = f"this node withdraws: {reason}"
        self._until = reactor.call_later(linger_s, lambda: None)
        self._import = reactor.call_later(_IMPORT_TAKES_S, lambda: None)
        reactor.every(_LOOK_EVERY_S, self._wait_for_import)
        reactor.call_later(_SILENT_LINGER_S, self._explain)

    @property
    def is_over(self) -> bool:
        """Whether all others have been notified, or time has run out."""
        return self._peers.all_notified or not self._until.is_pending

    def _wait_for_import(self) -> None:
        if self._peers.imports_torch and self._import.is_pending:
            self._until.restart(self._linger_s)

    def _explain(self) -> None:
        if not self.is_over:
            after = " after importing torch" if self._peers.imports_torch else ""
            self._note(
                f"{self._text}; waiting up to {self._linger_s:g} s{after} to notify the other nodes"
                " (Ctrl-C to exit now)"
            )


class NodeLink:
    """The link to the other nodes of a launch, which this one begins to join."""

    def __init__(
        self,
        plan: LaunchPlan,
        rendezvous: RendezvousAccess,
        reactor: Reactor,
        *,
        note: Callable[[str], None],
        negotiate: Callable[[Negotiate], None],
    ) -> None:
        config = rendezvous.config
        for warning in secret_warnings(os.environ, config):
            note(warning)
        node = ThisNode(
            config=config,
            info=describe_node(plan, rendezvous.secret),
            secret=rendezvous.secret,
            hub=Hub(reactor, note),
            fit=partial(fit_nodes, plan.request),
        )
        self.peers = Peers(node, negotiate=negotiate)
        self._note, self._reactor, self._linger_s = note, reactor, config.node_timeout_s
        self._host = os.uname().nodename
        self.hosts: tuple[str, ...] = (self._host,)
        """Host names in node order, once all nodes have joined."""
        self._linger: Linger | None = None
        self._signals_before = 0
        """How many signals had arrived when it began to linger."""

    def carry_out(
        self,
        action: Report | Decide,
        state: State,
        layout: Layout,
        gather: Callable[[], Mapping[int, Evidence]],
        calls: Mapping[int, RankCalled],
    ) -> None:
        """Report to the coordinator; or, as the coordinator, send all nodes what comes next."""
        generation, now_ns = state.generation, self._reactor.now_ns()
        launch = (state, layout, self.hosts, self._host)
        match action:
            case Decide(next_after=Cause() as cause):
                self.peers.send(NextBegins(generation=generation + 1, cause=cause, at_ns=now_ns))
            case Decide():
                ending = asdict(describe_end(*launch))
                self.peers.send(LaunchOver(**ending, generation=generation, at_ns=now_ns))
            case Report(what="finished"):
                self.peers.send(Finished(generation=generation))
            case Report(what="leaves"):
                self.peers.send(Leave(generation=generation, why=_why_leaving(state)))
            case Report(what="failed"):
                self.peers.send(Failed(generation=generation, outcome=node_outcome(*launch)))
            case Report(what="cleared"):
                outcome = replace(node_outcome(*launch, gather()), calls=calls)
                self.peers.send(Cleared(generation=generation, outcome=outcome))

    def begin_to_linger(self, state: State, layout: Layout) -> None:
        """Withdraw, once the launch is over here, if not all nodes had joined."""
        nodes, self._signals_before = state.nodes, len(state.signals)
        if nodes.have_joined:
            # No event tells when the others have received all.
            self._reactor.every(_CHECK_DELIVERY_S, lambda: None)
            return
        ending = describe_end(state, layout, self.hosts, "it")
        if nodes.failed is None:
            code = ending.exit_code or RendezvousError.exit_code
            self.peers.withdraw(Withdraw(host=self._host, reason=ending.headline, exit_code=code))
        linger_s = _SIGNALLED_LINGER_S if state.signals else self._linger_s
        linger_s = max(linger_s, self.peers.least_linger_s)
        self._linger = Linger(self.peers, ending.headline, linger_s, self._note, self._reactor)

    def lingers(self, state: State) -> bool:
        """Return whether to wait until the others know how or why this launch ended."""
        if len(state.signals) != self._signals_before:
            return False
        if self._linger is None or state.nodes.have_joined:
            return not self.peers.all_delivered  # the network may be cut, and heal
        return not self._linger.is_over


def _why_leaving(state: State) -> str:
    if state.signals:
        return f"it was {why_stopped(state)}"
    if state.excluded is not None:
        return f"{state.excluded.who} excludes it: {state.excluded.reason}"
    return describe_lost_process(state) or ""


def describe_node(plan: LaunchPlan, secret: bytes) -> Join:
    """Return the description that this node sends to the others; ``secret`` keys its hashes."""
    request = plan.request
    compares = request.rendezvous.compares_programs
    slots = plan.slots_per_node
    return Join(
        host=os.uname().nodename,
        node_rank=request.rendezvous.node_rank,
        nproc=slots[plan.node_rank if len(slots) > plan.node_rank else 0],
        role=request.role,
        domain=plan.domain if request.intra_domain else "",
        launcher=secrets.token_hex(8),
        addresses=addresses_to_name(),
        settings={
            "meshrun's version": __version__,
            "torch's version": _version("torch"),
            "--nnodes": format_nnodes(request.rendezvous.least_nodes, plan.layout.nnodes),
            "--mesh": format_mesh(request.mesh) if request.mesh else "",
            **_as_options(format_derived(request.flattens, request.views)),
            "--intra-node": ",".join(request.intra_node),
            "--intra-domain": ",".join(request.intra_domain),
            "--domain-size": str(request.domain_size or ""),
            "--place": request.place,
            "the device": plan.device_type or "",
            **_as_options(format_group_options(request.groups)),
            "--mesh-init": request.mesh_init,
            "--max-restarts": str(request.max_restarts),
            "--nproc-per-node": _fixed_workers(plan),
            "--check-gpus": "yes" if request.check_gpus else "",
            "the GPUs' driver": ask_driver(read_driver_version) if request.check_gpus else "",
        },
        program=describe_program(plan.program, os.environ, key=secret) if compares else {},
    )


def describe_program(
    program: Program, env: Mapping[str, str], *, key: bytes
) -> dict[str, list[str]]:
    """Return parts of the program to compare between nodes: [value to compare, text to show].

    Paths may differ, but not the content. Arguments cross the network as keyed hashes, and as texts
    without secrets.
    """
    if program.kind == "script":
        parts = {PROGRAM: ["a script", f"the script {program.target}"]}
    elif program.kind == "module":
        parts = {PROGRAM: [f"-m {program.target}"] * 2}
    else:
        name = os.path.basename(program.target)
        parts = {PROGRAM: [f"the command {name}"] * 2}
    if (found := digest_program(program)) is not None:
        path, digest = found
        parts[PROGRAM_FILE] = [digest, f"{path} (sha256 {digest[:12]})"]
    shown = Mask(env).words(program.args)
    for number, word in enumerate(program.args[:_MOST_ARGUMENTS]):
        parts[f"argument {number + 1} of the program"] = [
            _keyed_hash(key, word),
            f"`{shown[number][:_SHOWN]}`",
        ]
    if rest := program.args[_MOST_ARGUMENTS:]:
        whole = "\0".join(rest)
        parts["the rest of the arguments"] = [_keyed_hash(key, whole), count(len(rest), "word")]
    return parts


def _keyed_hash(key: bytes, text: str) -> str:
    return hmac.new(key, text.encode(errors="surrogateescape"), "sha256").hexdigest()[:32]


def _as_options(variables: Mapping[str, str]) -> dict[str, str]:
    """Return options by their names on the command line instead of the names of variables."""
    return {flag_of(name.removeprefix("MESHRUN_")): text for name, text in variables.items()}


def _fixed_workers(plan: LaunchPlan) -> str:
    """Return the workers per node if they determine the mesh's shape, and so cannot differ."""
    requested = plan.request.nproc_per_node
    if isinstance(requested, tuple):
        return ",".join(map(str, requested))
    mesh = plan.request.mesh
    if mesh is None or mesh.is_inferred:
        return ""
    return str(max(plan.layout.nproc_per_node))


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
