"""Joins the other nodes, with a description of this node and its program."""

from __future__ import annotations

import hmac
import os
import secrets
from collections.abc import Callable, Mapping
from functools import partial
from importlib.metadata import PackageNotFoundError, version

from msgspec import Struct
from msgspec.structs import replace

from meshrun import __version__
from meshrun.host.nvml import ask_driver, read_driver_version
from meshrun.host.printable import Mask
from meshrun.host.reactor import Reactor
from meshrun.layout import format_derived
from meshrun.layout.spec import format_mesh
from meshrun.plan.group_options import format_group_options
from meshrun.plan.parse import format_nnodes
from meshrun.plan.plan import LaunchPlan
from meshrun.plan.rank_program import Program
from meshrun.plan.rendezvous_config import RendezvousConfig
from meshrun.protocol.to_zygote import Negotiate
from meshrun.rendezvous.expected_nodes import PROGRAM, PROGRAM_FILE
from meshrun.rendezvous.hub import Hub
from meshrun.rendezvous.membership import fit_nodes
from meshrun.rendezvous.messages import Join
from meshrun.rendezvous.node_assigner import addresses_to_name
from meshrun.rendezvous.peers import Peers
from meshrun.rendezvous.secret import find_secret, read_secret, secret_warnings
from meshrun.rendezvous.this_node import ThisNode
from meshrun.supervisor.node_link import NodeLink
from meshrun.supervisor.program_file import digest_program
from meshrun.wording import count, flag_of

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


def join_nodes(
    plan: LaunchPlan,
    rendezvous: RendezvousAccess,
    reactor: Reactor,
    *,
    note: Callable[[str], None],
    negotiate: Callable[[Negotiate], None],
) -> NodeLink:
    """Begin to join the other nodes."""
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
    peers = Peers(node, negotiate=negotiate)
    return NodeLink(peers, note, reactor, linger_s=config.node_timeout_s)


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
