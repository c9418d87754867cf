"""Launches on the nodes of a Ray cluster, from a program that may itself be connected to it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, overload

from meshrun.api.launch import LaunchOptions, sign
from meshrun.api.launch import launch as launch_here
from meshrun.layout.parameters import check_parameters
from meshrun.protocol.result import LaunchResult

if TYPE_CHECKING:
    from typing_extensions import Unpack

_P = ParamSpec("_P")
_R = TypeVar("_R")


class RayOptions(LaunchOptions, total=False):
    """Parameters of :func:`launch`: those of :func:`meshrun.launch`, and those of the cluster."""

    resources: Mapping[str, float] | None
    strategy: str | None
    domain: str | None
    timeout: float | str | None
    address: str | None


@overload
def launch(
    program: str | os.PathLike[str],
    *,
    args: Sequence[str | os.PathLike[str]] = (),
    module: bool = False,
    **flags: Unpack[RayOptions],
) -> LaunchResult: ...


@overload
def launch(
    program: Callable[_P, _R],
    *,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    **flags: Unpack[RayOptions],
) -> list[_R]: ...


def launch(
    program: Any,
    *,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    module: bool = False,
    **flags: Any,
) -> Any:
    """Launch a script or a function on nodes of a Ray cluster, and wait for it to finish.

    Args:
        program: As for :func:`meshrun.launch`, like the other parameters except the last ones.
        args: Arguments of the script or the function.
        kwargs: The function's keyword arguments.
        module: Whether ``program`` is the name of a module.
        **flags: Those of :func:`meshrun.launch`, and these, which may all be omitted:
        resources: What each node needs, by Ray's names: by default a CPU for each rank, and a GPU
            if the cluster has any.
        strategy: A strategy of Ray's placement groups, such as ``STRICT_SPREAD``, which gives each
            launcher a node to itself.
        domain: A label that all nodes must share, such as ``ray.io/gpu-domain``.
        timeout: How long to wait for the nodes: 60 or ``"10m"``.
        address: The address of the cluster. By default the one that this process is connected to,
            or ``RAY_ADDRESS``, or the cluster on this machine.

    Returns:
        For a script, its result, even if it failed; for a function, what each rank returned,
        in rank order.

    Raises:
        UsageError: If the request is invalid; nothing was started.
        HostError: If there is no cluster, or it cannot provide the nodes.
        RankFailed: If a rank of a function failed without an exception that can be raised here.
        Exception: What the first rank to fail raised, if ``program`` is a function; its
            ``__cause__`` shows the rank's traceback.
    """
    flags = {name: value for name, value in flags.items() if value is not None}
    check_parameters(RayOptions, flags)
    given = {**flags.pop("resources", {})}
    given |= {name: flags.pop(name) for name in ("strategy", "domain", "timeout") if name in flags}
    words = [f"--submit-arg={name}={value}" for name, value in given.items()]
    options = flags.pop("options", ())
    if (address := flags.pop("address", None) or _connected()) is not None:
        flags["env"] = {**flags.get("env", {}), "RAY_ADDRESS": address}
    flags |= {"args": args, "kwargs": kwargs, "module": module}
    return launch_here(
        program,
        options=["--submit=ray", *words, *([options] if isinstance(options, str) else options)],
        **flags,
    )


sign(launch, RayOptions)


def _connected() -> str | None:
    """Return the address of the cluster that this process is connected to, or ``None``."""
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return None
    return str(ray.get_runtime_context().gcs_address)
