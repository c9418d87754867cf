"""Completion scripts: the options as words, so that completing starts no interpreter."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from meshrun.plan.parse import parse_choice

_SHELLS = ("bash", "zsh", "fish", "tcsh")


def render_completion(shell: str, parameters: Iterable[Any]) -> str:
    """Return a script that completes meshrun's options and file names.

    Args:
        shell: ``bash``, ``zsh``, ``fish`` or ``tcsh``.
        parameters: The command's parameters, as click describes them.

    Raises:
        UsageError: If there is no script for this shell.
    """
    shell = parse_choice(shell, "--print-completion", _SHELLS)
    options = [
        (parameter.opts, (parameter.help or "").strip(), not parameter.is_flag)
        for parameter in parameters
        if any(name.startswith("-") for name in parameter.opts)
    ]
    names = [name for opts, _, _ in options for name in opts if name.startswith("--")]
    if shell == "bash":
        return f"complete -o default -W '{' '.join(names)}' meshrun"
    if shell == "tcsh":
        return f"complete meshrun 'c/--/({' '.join(name[2:] for name in names)})/' 'p/*/f/'"
    lines = [_render(shell, opts, text, takes_value) for opts, text, takes_value in options]
    if shell == "fish":
        return "\n".join(lines)
    body = " \\\n  ".join(["_arguments", *lines, "'1:program:_files'", "'*:argument:_files'"])
    return f"#compdef meshrun\n{body}"


def _render(shell: str, opts: list[str], text: str, takes_value: bool) -> str:
    text = text.replace("'", "").replace("[", "(").replace("]", ")").replace(":", "\\:")
    if shell == "zsh":
        value = ":value:_files" if takes_value else ""
        return " ".join(f"'{name}[{text}]{value}'" for name in opts)
    flags = " ".join(
        f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}" for name in opts
    )
    return f"complete -c meshrun {flags}{' -r' if takes_value else ''} -d '{text}'"
