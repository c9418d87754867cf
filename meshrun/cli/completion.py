"""Completion scripts: the options as words, so that completing starts no interpreter."""

from __future__ import annotations

from typing import Any

from meshrun.cli.option import Option, ParsedOptions

_FILES, _FOLDERS = "FILE", "DIR"
_AFTER_A_DIM = {
    **dict.fromkeys(("WHERE", "WHICH", "[DIM=]TIME", "[DIM=]NAME"), "="),
    "DIM:K=V": ":",
    **dict.fromkeys(("DIM", "DIM[,DIM]"), ""),
}
"""What follows a dim in values that begin with one, by metavar."""


def render_completion(shell: str, table: type[ParsedOptions]) -> str:
    """Return a script for bash, zsh, fish or tcsh that completes options and their values."""
    rows = table.rows()
    if shell == "tcsh":
        names = " ".join(row.flag[2:] for row in rows)
        return f"complete meshrun 'c/--/({names})/' 'p/*/f/'"
    if shell == "bash":
        flags = " ".join(flag for row in rows for flag in reversed(row.flags))
        cases = "\n".join(f"    {'|'.join(row.flags)}) {_bash(row)} ;;" for row in rows)
        return _BASH.replace("@CASES@", cases).replace("@FLAGS@", flags)
    valued = [flag for row in rows if _may_have_value(row) for flag in row.flags]
    if shell == "fish":
        lines = "\n".join(map(_fish, rows))
        return _FISH.replace("@LINES@", lines).replace("@VALUED@", " ".join(valued))
    lines = " \\\n    ".join(_zsh(row, flag) for row in rows for flag in row.flags)
    return _ZSH.replace("@LINES@", lines)


# ---- bash ----------------------------------------------------------------------------------

_BASH = """\
# Completes meshrun's options in bash; made by `meshrun --print-completion bash`.
_meshrun_value() {  # of option $1: kind and words -> kind, words
  case $1 in
@CASES@
    *) kind=unknown ;;
  esac
}

_meshrun_dims() {  # of the mesh on this line
  local spec=$MESHRUN_MESH names= index
  for ((index = 1; index < ${#typed[@]}; index++)); do
    case ${typed[index]} in
      --mesh) spec=${typed[index + 1]} ;;
      --mesh=*) spec=${typed[index]#*=} ;;
      --names) names=${typed[index + 1]} ;;
      --names=*) names=${typed[index]#*=} ;;
    esac
  done
  local IFS=, dim
  for dim in ${names:-$spec}; do
    [[ ${dim%%=*} == [a-zA-Z_]* ]] && echo "${dim%%=*}$1"
  done
}

_meshrun() {
  local line=${COMP_LINE:0:COMP_POINT} IFS=$' \\t\\n' typed kind= words= index word option= begun=
  read -ra typed <<<"$line"
  [[ $line == *[[:space:]] ]] && typed+=("")
  local last=$((${#typed[@]} - 1))
  local current=${typed[last]}
  for ((index = 1; index < last; index++)); do
    word=${typed[index]}
    [[ $word == -?* && $word != -- ]] || return 0  # the program: bash completes its files
    [[ $word == *=* ]] && continue
    _meshrun_value "${word//_/-}"
    [[ $kind == flag || $kind == unknown ]] && continue
    ((++index == last)) && option=${word//_/-}
  done
  if [[ $current == --*=* ]]; then
    option=${current%%=*} begun=${current%%=*}=
    current=${current#*=}
  elif [[ -z $option && $current == -* ]]; then
    COMPREPLY=($(compgen -W '@FLAGS@' -- "$current"))
    return
  fi
  if [[ -z $option ]]; then
    compopt -o filenames
    COMPREPLY=($(compgen -f -X '!*.py' -- "$current"; compgen -d -- "$current"))
    return
  fi
  _meshrun_value "$option"
  case $kind in
    files) return ;;
    folders) compopt -o filenames; COMPREPLY=($(compgen -d -- "$current")); return ;;
    dims*)
      [[ $current == *,* ]] && begun+=${current%,*},
      words=$(_meshrun_dims "${kind#dims}")
      current=${current##*,}
      [[ $kind == dims ]] || compopt -o nospace ;;
  esac
  COMPREPLY=($(compgen -W "$words" -- "$current"))
  # What stands before the last `=` or `:` is a word of its own to bash.
  local whole=$begun$current index
  [[ $whole == *[=:]* ]] && whole=${whole%"${whole##*[=:]}"} || whole=
  for index in "${!COMPREPLY[@]}"; do
    COMPREPLY[index]=$begun${COMPREPLY[index]}
    COMPREPLY[index]=${COMPREPLY[index]#"$whole"}
  done
  [[ ${#COMPREPLY[@]} -gt 0 ]] || compopt +o default
}
complete -o default -F _meshrun meshrun"""


def _bash(row: Option[Any]) -> str:
    if not _may_have_value(row):
        return "kind=flag"
    if row.metavar in _AFTER_A_DIM:
        return f"kind=dims{_AFTER_A_DIM[row.metavar]}"
    kind = {_FILES: "files", _FOLDERS: "folders"}.get(row.metavar, "words")
    return f"kind={kind} words='{' '.join(row.suggested)}'"


# ---- zsh -----------------------------------------------------------------------------------

_ZSH = """\
#compdef meshrun
# Completes meshrun's options in zsh; made by `meshrun --print-completion zsh`.
_meshrun_dims() {  # of the mesh on this line, with $1 behind each
  local spec=$MESHRUN_MESH names= index
  for ((index = 2; index < $#words; index++)); do
    case $words[index] in
      --mesh) spec=$words[index+1] ;;
      --mesh=*) spec=${words[index]#*=} ;;
      --names) names=$words[index+1] ;;
      --names=*) names=${words[index]#*=} ;;
    esac
  done
  local -a dims=(${${(s:,:)${names:-$spec}}%%=*})
  compset -P '*,'
  compadd -S "$1" -q -- ${(M)dims:#[a-zA-Z_]*}
}

_meshrun() {
  _arguments -s -A '-*' \\
    @LINES@ \\
    '1:program:_files -g "*.py(-.)"' '*:argument:_files'
}

if [[ $funcstack[1] == _meshrun ]]; then
  _meshrun "$@"
else
  (( $+functions[compdef] )) || { autoload -Uz compinit && compinit; }
  compdef _meshrun meshrun
fi"""


def _zsh(row: Option[Any], flag: str) -> str:
    text = _text(row).replace("[", "(").replace("]", ")").replace(":", "\\:")
    repeated = "*" * row.repeats
    if not _may_have_value(row):
        return f"'{flag}[{text}]'"
    equals = "=" if flag.startswith("--") else ""
    metavar = row.metavar.replace("[", "(").replace("]", ")").replace(":", "\\:")
    colons = ":" if row.takes_value else "::"  # one that may be left out
    return f"'{repeated}{flag}{equals}[{text}]{colons}{metavar}:{_zsh_value(row)}'"


def _zsh_value(row: Option[Any]) -> str:
    if row.metavar in _AFTER_A_DIM:
        return f'{{_meshrun_dims "{_AFTER_A_DIM[row.metavar]}"}}'.replace(":", "\\:")
    files = {_FILES: "_files", _FOLDERS: "_files -/"}.get(row.metavar)
    return files or (f"({' '.join(row.suggested)})" if row.suggested else " ")


# ---- fish ----------------------------------------------------------------------------------

_FISH = """\
# Completes meshrun's options in fish; made by `meshrun --print-completion fish`.
function __meshrun_is_before_program
    set -l words (commandline -opc)
    set -l takes_value @VALUED@
    set -l is_value no
    for word in $words[2..]
        set -l name (string replace -a _ - -- $word)
        if test $is_value = yes
            set is_value no
        else if not string match -q -- '-*' $word
            return 1
        else if contains -- $name $takes_value
            set is_value yes
        end
    end
    return 0
end

function __meshrun_dims  # of the mesh on this line, with $argv[1] behind each
    set -l words (commandline -opc)
    set -l spec $MESHRUN_MESH
    set -l names
    for index in (seq 2 (count $words))
        switch $words[$index]
            case --mesh
                set spec $words[(math $index + 1)]
            case '--mesh=*'
                set spec (string replace -- --mesh= '' $words[$index])
            case --names
                set names $words[(math $index + 1)]
            case '--names=*'
                set names (string replace -- --names= '' $words[$index])
        end
    end
    test -n "$names"; and set spec $names
    set -l value (string replace -r -- '^--[a-z-]*=' '' (commandline -ct))
    set -l begun (string match -r -- '.*,' $value)
    for dim in (string split , -- $spec)
        set dim (string replace -r -- '=.*' '' $dim)
        string match -qr '^[a-zA-Z_]' -- $dim; and echo "$begun$dim$argv[1]"
    end
end

complete -c meshrun -e
@LINES@"""


def _fish(row: Option[Any]) -> str:
    short = f" -s {row.short[1:]}" if row.short else ""
    flags = f"-n __meshrun_is_before_program -l {row.flag[2:]}{short}{_fish_value(row)}"
    return f"complete -c meshrun {flags} -d '{_text(row)}'"


def _fish_value(row: Option[Any]) -> str:
    if not _may_have_value(row):
        return ""
    if row.metavar == _FILES:
        return " -r -F"
    if row.metavar == _FOLDERS:
        return " -x -a '(__fish_complete_directories)'"
    if row.metavar in _AFTER_A_DIM:
        return f" -x -a '(__meshrun_dims \"{_AFTER_A_DIM[row.metavar]}\")'"
    return f" -x -a '{' '.join(row.suggested)}'" if row.suggested else " -x"


def _may_have_value(row: Option[Any]) -> bool:
    return row.takes_value or bool(row.suggested)


def _text(row: Option[Any]) -> str:
    return (row.brief or row.help.partition(". ")[0].rstrip(".")).replace("'", "").replace("`", "")
