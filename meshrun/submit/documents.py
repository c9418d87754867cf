"""Documents for Kubernetes: written as readable YAML with comments, and changed by patches. Pure.

Source:
    Kubernetes, "Update API Objects in Place Using kubectl patch", and the merge keys of its API.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from msgspec import Struct

from meshrun.errors import UsageError
from meshrun.protocol.packing import read_json
from meshrun.wording import count

_PLAIN = re.compile(r"[A-Za-z/][A-Za-z0-9_./-]*")
_WORDS = frozenset({"true", "false", "yes", "no", "on", "off", "null", "y", "n"})
"""Words that YAML 1.1 does not read as text."""
_INDENT = "  "
_KEYS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("containers", "initContainers", "ephemeralContainers", "env"), ("name",)),
    **dict.fromkeys(("volumes", "imagePullSecrets", "schedulingGates"), ("name",)),
    **dict.fromkeys(("resourceClaims", "claims", "replicatedJobs"), ("name",)),
    "volumeMounts": ("mountPath",),
    "volumeDevices": ("devicePath",),
    "hostAliases": ("ip",),
    "topologySpreadConstraints": ("topologyKey",),
    "ports": ("containerPort", "port"),
}
"""The fields that identify the entries of a list; lists without one are replaced."""
_DIRECTIVES = ("merge", "replace", "delete")
_POD = "Pod"
_SET_ELSEWHERE = {
    "name": "set another name with --rdzv-id",
    "namespace": "use --submit-arg=--namespace=...",
}
_GONE = object()
Path = tuple[str | int, ...]


class Commented(Struct, frozen=True):
    """A value, and the comment above its key."""

    value: Any
    comment: str


def render_yaml(document: Mapping[str, Any]) -> str:
    """Return a document of mappings, lists, texts, numbers, booleans and nulls."""
    return "".join(f"{line}\n" for line in _block(document, ""))


def quote(text: str) -> str:
    """Return a text as a scalar that every YAML parser reads as this text.

    Example:
        >>> print(quote("train.py"), quote("yes"))
        train.py "yes"
    """
    if _PLAIN.fullmatch(text) and text.lower() not in _WORDS:
        return text
    return f'"{"".join(map(_escape, text))}"'


def _escape(sign: str) -> str:
    if sign == '"':
        return '\\"'
    is_plain = sign.isprintable() and sign not in "\\\ufeff"
    return sign if is_plain else sign.encode("unicode_escape").decode()


def _block(values: Mapping[str, Any] | list[Any], indent: str) -> Iterator[str]:
    """Yield the lines of a mapping or a list that is not empty."""
    pairs = values.items() if isinstance(values, Mapping) else ((None, each) for each in values)
    for key, given in pairs:
        head, value = indent + ("-" if key is None else f"{quote(key)}:"), given
        if isinstance(given, Commented):
            yield from (f"{indent}# {line}" for line in given.comment.splitlines())
            value = given.value
        if not isinstance(value, Mapping | list) or not value:
            yield f"{head} {_scalar(value)}"
        elif key is None:
            first, *rest = _block(value, indent + _INDENT)
            yield f"{head} {first.lstrip()}"
            yield from rest
        else:
            yield head
            yield from _block(value, indent + _INDENT)


def _scalar(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if value is None:
        return "null"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, Mapping | list):
        return "{}" if isinstance(value, Mapping) else "[]"
    return quote(str(value))


class Patch(Struct, frozen=True):
    """A document of a ``--submit-patch`` file."""

    source: str
    """The file."""
    document: Mapping[str, Any]

    def error(self, reason: str, *, hint: str | None = None) -> UsageError:
        """Return an error that names the file."""
        return UsageError(f"--submit-patch {self.source}: {reason}", hint=hint)


def read_patches(text: str, source: str) -> tuple[Patch, ...]:
    """Return the documents of a file: YAML, or a JSON object.

    Raises:
        UsageError: If it cannot be parsed, or is not a patch.
    """
    try:
        documents = _read(text)
    except ImportError:
        raise UsageError(
            f"--submit-patch {source}: reading YAML needs PyYAML",
            hint="pip install 'meshrun[kubernetes]', or write the patch as JSON",
        ) from None
    except ValueError as error:
        raise UsageError(f"--submit-patch {source}: {' '.join(str(error).split())}") from error
    patches = tuple(Patch(source, each) for each in documents if each is not None)
    for patch in patches:
        if not isinstance(patch.document, Mapping):
            raise patch.error(
                "expected fields of the manifest, found"
                f" {'a list' if isinstance(patch.document, list) else repr(patch.document)}",
                hint="for example: spec: {template: {spec: {serviceAccountName: train}}}",
            )
        try:
            _check_keys(patch, patch.document)
        except RecursionError:
            raise patch.error("it contains itself through an alias") from None
    return patches


def _read(text: str) -> list[Any]:
    try:
        return [read_json(text)]
    except ValueError:
        import yaml  # not needed for JSON
    try:
        return list(yaml.safe_load_all(text))
    except yaml.YAMLError as error:
        raise ValueError(error) from error
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _check_keys(patch: Patch, value: Any) -> None:
    """Refuse field names that are not text, such as ``on``, which YAML reads as true."""
    for name in value if isinstance(value, Mapping) else ():
        if not isinstance(name, str):
            raise patch.error(f"field names must be text, found {name!r}")
    below = value.values() if isinstance(value, Mapping) else value
    for each in below if isinstance(value, Mapping | list) else ():
        _check_keys(patch, each)


def apply_patches(
    documents: Sequence[dict[str, Any]],
    patches: Sequence[Patch],
    *,
    pod: Path | None,
    counts: Mapping[Path, int],
) -> list[dict[str, Any]]:
    """Return documents with the patches merged into them.

    Args:
        documents: The documents; the last one is the job itself.
        patches: A patch without a kind applies to the job, one of kind Pod to its pods.
        pod: The path of the pods' template in the job, if it has one.
        counts: The paths of the number of nodes in the job, which a patch must not change.

    Raises:
        UsageError: If a patch applies to no document, or contradicts the plan.
    """
    found = list(documents)
    for patch in patches:
        number, path = _target(found, patch, pod)
        found[number] = _at(found[number], path, patch)
        for where, nodes in counts.items():
            value = _plain(_look_up(found[-1], where))
            if value != nodes:
                raise patch.error(
                    f"sets {_dotted(where)} to {value}, but the plan has {count(nodes, 'node')}",
                    hint="use --nnodes",
                )
        if pod is not None:
            _check_containers(_plain(_look_up(found[-1], pod)), patch)
    return found


def _target(
    documents: Sequence[Mapping[str, Any]], patch: Patch, pod: Path | None
) -> tuple[int, Path]:
    kind, version = patch.document.get("kind"), patch.document.get("apiVersion")
    last = len(documents) - 1
    for name, hint in _SET_ELSEWHERE.items():
        metadata = patch.document.get("metadata")
        if isinstance(metadata, Mapping) and name in metadata:
            raise patch.error(f"metadata.{name} would not match the other manifests", hint=hint)
    if kind is None:
        return last, ()
    if kind == _POD:
        if pod is None:
            workload = documents[last]["kind"]
            raise patch.error(
                f"the pods of a {workload} are described by its runtime",
                hint=f"patch the {workload} itself, with spec.runtimePatches",
            )
        return last, pod
    for number, document in enumerate(documents):
        if document["kind"] == kind and version in (None, document["apiVersion"]):
            return number, ()
    known = [f"{each['kind']} ({each['apiVersion']})" for each in documents]
    raise patch.error(
        f"it is for a {kind}{f' ({version})' if version else ''}, and the job has"
        f" {', '.join(known)}",
        hint="leave out kind and apiVersion for the job itself"
        + ("" if pod is None else f", or write kind: {_POD} for its pods"),
    )


def _at(value: Any, path: Path, patch: Patch) -> Any:
    """Return a value with the patch merged in at ``path``."""
    if isinstance(value, Commented):
        return Commented(_at(value.value, path, patch), value.comment)
    if not path:
        own = ("apiVersion", "kind")
        change = {name: each for name, each in patch.document.items() if name not in own}
        return _merge_fields(value, change, patch)
    first, *rest = path
    copy = dict(value) if isinstance(value, Mapping) else list(value)
    copy[first] = _at(value[first], tuple(rest), patch)  # type: ignore[index]
    return copy


def _merge(base: Any, change: Any, name: str, patch: Patch) -> Any:
    plain = _plain(base)
    if plain is not None and _shape(plain) != _shape(change):
        raise patch.error(f"{name} is {_shape(plain)}, found {_shape(change)}: {change}")
    if isinstance(change, Mapping):
        merged = _merge_fields(plain or {}, change, patch)
    elif isinstance(change, list) and name in _KEYS:
        merged = _merge_entries(plain or [], change, name, patch)
    elif isinstance(change, list) and name == "finalizers":
        merged = [*(plain or []), *(each for each in change if each not in (plain or []))]
    else:
        return change
    keeps_comment = isinstance(base, Commented) and merged is not _GONE
    return Commented(merged, base.comment) if keeps_comment else merged


def _merge_fields(base: Mapping[str, Any], change: Mapping[str, Any], patch: Patch) -> Any:
    directive = _directive(change, patch)
    if directive == "delete":
        return _GONE
    merged = {} if directive == "replace" else dict(base)
    for name, value in change.items():
        if name == "$patch":
            continue
        after = _GONE if value is None else _merge(merged.get(name), value, name, patch)
        if after is _GONE:
            merged.pop(name, None)
        else:
            merged[name] = after
    return merged


def _merge_entries(base: list[Any], change: list[Any], name: str, patch: Patch) -> list[Any]:
    merged = list(base)
    for entry in change:
        if not isinstance(entry, Mapping):
            raise patch.error(f"entries of {name} are mappings, found {entry!r}")
        directive = _directive(entry, patch)
        key = next((key for key in _KEYS[name] if key in entry), None)
        if key is None and directive == "replace":
            merged.clear()
            continue
        if key is None:
            raise patch.error(f"an entry of {name} has no {' or '.join(_KEYS[name])}: {entry}")
        same = [at for at, each in enumerate(merged) if _plain(each).get(key) == entry[key]]
        after = _merge(merged[same[0]] if same else None, entry, "", patch)
        if after is _GONE:
            merged = [each for at, each in enumerate(merged) if at not in same]
        elif same:
            merged[same[0]] = after
        else:
            merged.append(after)
    return merged


def _directive(change: Mapping[str, Any], patch: Patch) -> str | None:
    for name in change:
        if name.startswith("$") and name != "$patch":
            raise patch.error(f"`{name}` is not supported", hint="use `$patch`, or null to remove")
    directive: str | None = change.get("$patch")
    if directive not in (None, *_DIRECTIVES):
        raise patch.error(f"$patch is {', '.join(_DIRECTIVES)}, found {directive!r}")
    return directive


def _check_containers(template: Mapping[str, Any], patch: Patch) -> None:
    """Refuse a container without an image: it was meant for the ranks' under another name."""
    spec = _plain(template.get("spec")) or {}
    for container in map(_plain, _plain(spec.get("containers")) or []):
        if "image" not in container:
            raise patch.error(
                f"adds a container `{container.get('name')}` without an image",
                hint="the container of the ranks is named `meshrun`",
            )


def _shape(value: Any) -> str:
    if isinstance(value, Mapping):
        return "a mapping"
    return "a list" if isinstance(value, list) else "a single value"


def _look_up(value: Any, path: Path) -> Any:
    for name in path:
        value = _plain(value)
        try:
            value = value[name]
        except (KeyError, IndexError, TypeError):
            return None
    return value


def _plain(value: Any) -> Any:
    return value.value if isinstance(value, Commented) else value


def _dotted(path: Path) -> str:
    return "".join(f"[{each}]" if isinstance(each, int) else f".{each}" for each in path)[1:]
