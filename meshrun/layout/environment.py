"""Conversion of a layout to the environment variables of a rank, and back. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping

from meshrun.errors import MeshError, MeshrunError, SpecError
from meshrun.host import rank_variables as var
from meshrun.layout import MAX_RANKS, Layout, format_derived, parse_derived
from meshrun.layout.domains import shorten_domains, split_nodes
from meshrun.layout.spec import MeshSpec, format_mesh, parse_mesh
from meshrun.wording import count


def format_layout(layout: Layout) -> dict[str, str]:
    """Return the variables that describe a layout, in addition to torchrun's."""
    counts = layout.nproc_per_node
    if len(set(counts)) == 1:  # stays short on 10,000 nodes
        counts = counts[:1]
    texts = {var.NPROC_PER_NODE: ",".join(map(str, counts))}
    if layout.nodes_per_domain:
        domains = shorten_domains(layout.nodes_per_domain)
        sizes = [domains] if isinstance(domains, int) else domains
        texts[var.NODES_PER_DOMAIN] = ",".join(map(str, sizes))
    if layout.mesh is not None:
        texts[var.MESH] = format_mesh(layout.mesh)
        if layout.slot_order is not None:
            texts[var.SLOT_ORDER] = ",".join(layout.slot_order)
        texts.update(format_derived(layout.flattens, layout.views))
    return texts


def read_layout(env: Mapping[str, str]) -> Layout:
    """Return the layout that an environment describes, set by meshrun, torchrun or by hand.

    Raises:
        MeshError: If the variables contradict each other.
    """
    try:
        counts = _workers(env)
        mesh = _mesh(env, sum(counts))
        flattens, views = parse_derived([env.get(var.FLATTEN, "")], [env.get(var.VIEW, "")])
        restarts = read_number(env, var.GENERATION)
        if restarts is None:
            restarts = read_number(env, var.RESTART_COUNT)
        rank = read_number(env, var.RANK)
        previous, slots = env.get(var.PREVIOUS), env.get(var.SLOT_ORDER)
        return Layout(
            mesh=mesh,
            nproc_per_node=counts,
            nodes_per_domain=_domains(env, len(counts)),
            generation=restarts or 0,
            slot_order=tuple(slots.split(",")) if slots and mesh else None,
            own_rank=0 if rank is None and sum(counts) == 1 else rank,  # one rank needs no number
            previous=Layout.from_dict(json.loads(previous)) if previous else None,
            # Without a mesh, these variables are left over from another launch.
            flattens=flattens if mesh else (),
            views=views if mesh else (),
        )
    except MeshError:
        raise
    except (ValueError, MeshrunError) as error:
        raise not_a_launch(error) from error


def not_a_launch(error: Exception) -> MeshError:
    """Return the error for an environment that cannot be parsed."""
    if isinstance(error, SpecError):
        error.option = ""  # the spec is in a variable
    return MeshError(f"the environment does not describe a launch: {error}")


def _mesh(env: Mapping[str, str], ranks: int) -> MeshSpec | None:
    """Return the mesh over a number of ranks, if there is one."""
    text = env.get(var.MESH)
    if not text:
        return None
    mesh = given = parse_mesh(text)
    if given.is_inferred:
        size, rest = divmod(ranks, given.known_size)
        mesh = given.with_size(given.sizes.index(-1), size if not rest else 0)
    if mesh.known_size != ranks:
        raise _misfit(given, ranks)
    return mesh


def _domains(env: Mapping[str, str], nnodes: int) -> tuple[int, ...]:
    """Return the number of nodes in each domain, given once for all or per domain."""
    texts = env.get(var.NODES_PER_DOMAIN, "").split(",")
    sizes = tuple(_number(text, var.NODES_PER_DOMAIN, 1) for text in texts if text)
    return split_nodes(nnodes, sizes[0]) if len(sizes) == 1 else sizes


def _misfit(mesh: MeshSpec, ranks: int) -> MeshError:
    needs = count(mesh.known_size, "rank")
    hint = f"launch with `meshrun --mesh {mesh} ...`, or write `-1` for the size that may vary"
    if mesh.is_inferred:
        needs = f"a multiple of {mesh.known_size} ranks"
        hint = "the product of the other sizes must divide it"
    message = f"{var.MESH} `{mesh}` needs {needs}, but the environment has {ranks}"
    return MeshError(message, hint=hint)


def _workers(env: Mapping[str, str]) -> tuple[int, ...]:
    """Return the number of workers on each node, from meshrun's variable or torchrun's."""
    world_size = read_number(env, var.WORLD_SIZE, least=1) or 1
    listed = env.get(var.NPROC_PER_NODE)
    if listed:
        texts = listed.split(",")  # a node may have none
        counts = tuple(_number(text, var.NPROC_PER_NODE, 0) for text in texts)
        counts *= (read_number(env, var.GROUP_WORLD_SIZE, least=1) or 1) if len(counts) == 1 else 1
    else:
        local = read_number(env, var.LOCAL_WORLD_SIZE, least=1) or world_size
        counts = (local,) * (read_number(env, var.GROUP_WORLD_SIZE, least=1) or world_size // local)
    if sum(counts) != world_size and (env.get(var.WORLD_SIZE) or not listed):
        names = (var.WORLD_SIZE, var.LOCAL_WORLD_SIZE, var.GROUP_WORLD_SIZE, var.NPROC_PER_NODE)
        found = ", ".join(f"{name}={env[name]}" for name in names if env.get(name))
        hint = f"if nodes differ, list the workers of each: {var.NPROC_PER_NODE}=8,4"
        raise MeshError(f"conflicting numbers of ranks: {found}", hint=hint)
    return counts


def read_number(env: Mapping[str, str], name: str, least: int | None = None) -> int | None:
    """Return a variable that holds a whole number, or ``None`` if it is not set.

    Raises:
        MeshError: If it holds something else or, where ``least`` is given, a number that is not
            from ``least`` to ``MAX_RANKS``.
    """
    text = env.get(name)
    return _number(text, name, least) if text else None


def _number(text: str, name: str, least: int | None) -> int:
    try:
        number = int(text)
    except ValueError:
        raise MeshError(f"{name} must be a whole number, found `{text[:40]}`") from None
    if least is not None and not least <= number <= MAX_RANKS:
        raise MeshError(f"{name} must be from {least} to {MAX_RANKS:,}, found `{text}`")
    return number
