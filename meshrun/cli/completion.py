"""Completion scripts: the options as words, so that completing starts no interpreter."""

from __future__ import annotations

from typing import Any

from meshrun.cli.option import Option, ParsedOptions


def render_completion(shell: str, table: type[ParsedOptions]) -> str:
    """Return a script for bash, zsh, fish or tcsh that completes options and file names."""
    rows = table.rows()
    names = [row.flag for row in rows]
    if shell == "bash":
        return f"complete -o default -W '{' '.join(names)}' meshrun"
    if shell == "tcsh":
        return f"complete meshrun 'c/--/({' '.join(name[2:] for name in names)})/' 'p/*/f/'"
    if shell == "fish":
        return "\n".join(map(_fish, rows))
    lines = [_zsh(row, name) for row in rows for name in row.flags]
    body = " \\\n  ".join(["_arguments", *lines, "'1:program:_files'", "'*:argument:_files'"])
    return f"#compdef meshrun\n{body}"


def _zsh(row: Option[Any], name: str) -> str:
    text = _text(row).replace("[", "(").replace("]", ")").replace(":", "\\:")
    return f"'{name}[{text}]{':value:_files' * row.takes_value}'"


def _fish(row: Option[Any]) -> str:
    short = f" -s {row.short[1:]}" if row.short else ""
    flags = f"-l {row.flag[2:]}{short}{' -r' * row.takes_value}"
    return f"complete -c meshrun {flags} -d '{_text(row)}'"


def _text(row: Option[Any]) -> str:
    return row.help.replace("'", "").replace("`", "")
