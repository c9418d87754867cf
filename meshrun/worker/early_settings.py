"""What a program sets in its environment before it imports torch, read from its source.

Ranks are forked from a process that has imported torch, so variables that the program sets before
its import of torch must be set before that. The source is followed from its first statement to its
first import of torch, through its own functions and the modules beside it. None of it is executed;
variables that cannot be determined from the source are reported as unclear.
"""

from __future__ import annotations

import ast
import operator
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from msgspec import Struct

from meshrun.host.rank_variables import THREADS
from meshrun.host.visibility import CUDA, HIP, XPU

_AT_IMPORT = (
    "TORCH", "PYTORCH_", "AOT", "INDUCTOR_", "PT2_", "FX_", "KINETO_", "TRITON_",
    "KMP_", "GOMP_", "OMP_", "MKL", "DNNL_", "ONEDNN_", "OPENBLAS_", "NUMEXPR_", "NPY_", "NUMPY_",
)  # fmt: skip
"""Prefixes of variables that torch, or what it imports, may read at import."""
_LATER = (
    "TORCH_HOME", "TORCH_NCCL_", "TORCH_FR_", "TORCH_EXTENSIONS_DIR", "TORCH_CUDA_ARCH_LIST",
    "TORCHELASTIC_", "PYTORCH_KERNEL_CACHE_PATH",
)  # fmt: skip
"""Exceptions, which are read when they are needed."""
THREAD_COUNTS = (*THREADS, "MKL_NUM_THREADS")
"""Variables of numeric libraries whose effect can still be applied after the import."""
_BY_US = ("RANK", "LOCAL_", "WORLD_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_", "MESHRUN_")
"""Prefixes of variables that describe the launch to a rank, and from which the mesh is built."""
_OF_A_RANK = (*_BY_US, CUDA, HIP, XPU, *THREAD_COUNTS)
"""Variables that are set in a rank, but not in this process."""
_OF_PATHS = ("join", "dirname", "abspath", "realpath", "basename")
_PURE: dict[str, Callable[..., Any]] = {
    **{each.__name__: each for each in (str, int, bool, len, dict, list, tuple, set)},
    **{f"os.path.{name}": getattr(os.path, name) for name in _OF_PATHS},
}
_COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.In: lambda item, items: item in items,
    ast.NotIn: lambda item, items: item not in items,
}
_CONSTANTS = {
    "sys.platform": sys.platform,
    "os.name": os.name,
    "os.sep": os.sep,
    "typing.TYPE_CHECKING": False,
}
_PLAIN = (str, int, float, bool, list, tuple, dict, set, type(None))
_READING = ("items", "keys", "values", "get", "copy")
"""Methods that do not change their dict."""
_MOST_STATEMENTS = 20_000
"""How many statements are followed, in half a second: loops and calls may multiply them."""


def is_read_at_import(name: str) -> bool:
    """Return whether a variable may have no effect once torch has been imported."""
    return name.startswith(_AT_IMPORT) and not name.startswith(_LATER) and name not in THREAD_COUNTS


class EarlySettings(Struct, frozen=True):
    """Changes that the program makes to variables before it imports torch."""

    values: dict[str, str | None] = {}
    """Their values; ``None`` for a variable that it removes."""
    unclear: dict[str, str] = {}
    """Variables whose values only a run would show, with their places, such as ``train.py:12``."""

    def first_unclear(self, also: Callable[[str], bool] = lambda _: False) -> str | None:
        """Return where a variable read at import, or ``also``, is unclear: ``a.py:1 sets NAME``."""
        for name, place in self.unclear.items():
            if is_read_at_import(name) or also(name):
                return f"{place} sets {name}"
        return None

    @contextmanager
    def in_effect(self) -> Iterator[None]:
        """Apply the values to this process's environment while the block runs."""
        before = {name: os.environ.get(name) for name in self.values}
        _change_environment(self.values)
        try:
            yield
        finally:
            _change_environment(before)


def _change_environment(values: Mapping[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def read_early_settings(
    tree: ast.Module,
    path: str,
    env: Mapping[str, str],
    *,
    folder: str | None,
    package: str = "",
    args: Sequence[str],
) -> EarlySettings:
    """Return what a program sets before it imports torch.

    Args:
        tree: The program's syntax tree.
        path: Its file.
        env: Its environment, except for what differs between ranks.
        folder: The folder with modules of its own, if there is one.
        package: The package that is imported before it, if it is a module of a package.
        args: Its arguments.
    """
    reader = _Reader(env, folder, [path, *args])
    with suppress(Exception):  # including _End, and for programs not fully followed
        if package:
            reader.read_module(package)
        reader.read_file(tree, path, "__main__")
    return reader.found()


class _End(Exception):
    """The program has reached its first import of torch, or is too long to be followed further."""


class _Returned(Exception):
    """The function has returned."""


class _Unknown(Exception):
    """A value that cannot be determined from the source."""


class _Named(Struct, frozen=True):
    """An object of which only the full name is known, such as ``os.environ``."""

    name: str


class _Names(dict[str, Any]):
    """The known values of names in a module or a function."""


class _Function(Struct, frozen=True):
    """A function of the program, and the names of its module."""

    node: ast.FunctionDef | ast.AsyncFunctionDef
    names: _Names


class _Reader:
    """Follows statements in the order of their execution, and evaluates simple expressions."""

    def __init__(self, env: Mapping[str, str], folder: str | None, argv: list[str]) -> None:
        self._constants: dict[str, Any] = {**_CONSTANTS, "sys.argv": argv}
        self._env: dict[str, str] = dict(env)
        self._before: dict[str, str] = dict(env)
        self._folder = folder
        self._written: set[str] = set()
        self._unclear: dict[str, str] = {}
        self._doubt = 0
        """Nesting depth of conditions that only a run would decide."""
        self._entered: list[ast.AST] = []
        """The functions that are being followed; a call of one of them is not followed again."""
        self._left = _MOST_STATEMENTS
        self._modules: dict[str, _Names] = {}
        """The names of the program's own modules, by path."""
        self._names = _Names()
        """Those of the module or function that is being followed."""

    def found(self) -> EarlySettings:
        """Return what was read."""
        unclear = {name: at for name, at in self._unclear.items() if not _is_left_out(name)}
        known = sorted(self._written - self._unclear.keys())
        values = {name: self._env.get(name) for name in known if not _is_left_out(name)}
        changed = {name: now for name, now in values.items() if now != self._before.get(name)}
        return EarlySettings(changed, unclear)

    # ---- statements ------------------------------------------------------------------------

    def read_file(self, tree: ast.Module, path: str, name: str) -> None:
        self._modules[path] = names = _Names(__name__=name, __file__=path)
        self._run_with(names, tree.body)

    def _run_with(self, names: _Names, body: list[ast.stmt]) -> None:
        outer, self._names = self._names, names
        try:
            self._run(body)
        finally:
            self._names = outer

    def _run(self, body: list[ast.stmt]) -> None:
        for statement in body:
            self._step(statement)

    def _run_in_doubt(self, body: list[ast.stmt]) -> None:
        self._doubt += 1
        with suppress(_Returned):  # the doubt remains: the rest of the function may not run
            self._run(body)
            self._doubt -= 1

    def _step(self, statement: ast.stmt) -> None:  # noqa: C901, PLR0912, PLR0915
        self._left -= 1
        if self._left < 0:
            raise _End
        self._follow_calls(statement)
        names = self._names
        match statement:
            case ast.Import(names=aliases):
                for alias in aliases:
                    known = self.read_module(alias.name)
                    top = alias.name if alias.asname else alias.name.partition(".")[0]
                    names[alias.asname or top] = known or _Named(top)
            case ast.ImportFrom(module=module, names=aliases, level=level):
                known = self.read_module(f"{'.' * level}{module or ''}")
                for alias in aliases:
                    named = _Named(f"{module}.{alias.name}")
                    names[alias.asname or alias.name] = known.get(alias.name, named)
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                names[name] = _Function(statement, names)
            case ast.ClassDef(name=name):
                names.pop(name, None)
            case ast.Assign(targets=targets, value=value):
                for target in targets:
                    self._assign(target, value)
            case ast.AnnAssign(target=target, value=ast.expr() as value):
                self._assign(target, value)
            case ast.AugAssign(target=target, value=value):
                if self._full_name(target) == "os.environ":
                    self._update([value], [], self._place(statement))
                elif isinstance(target, ast.Name):
                    names.pop(target.id, None)
                else:
                    self._assign(target, None)
            case ast.Delete(targets=targets):
                for target in targets:
                    if (key := self._variable(target)) is not None:
                        self._write(key, None, self._place(target))
            case ast.If(test=test, body=body, orelse=orelse):
                if (known := self._known(test)) is not _Unknown:
                    self._run(body if known else orelse)
                else:
                    self._run_in_doubt(body)
                    self._run_in_doubt(orelse)
            case ast.For(target=target, iter=iterable, body=body):
                try:
                    items = list(self._value(iterable))
                except Exception:
                    self._run_in_doubt(body)
                else:
                    for item in items:
                        self._bind(target, item)
                        self._run(body)
            case ast.With(body=body):
                self._run(body)
            case ast.Try(body=body, handlers=handlers, orelse=orelse, finalbody=finalbody):
                self._run([*body, *orelse])
                for handler in handlers:
                    self._run_in_doubt(handler.body)
                self._run(finalbody)
            case ast.While(body=body):
                self._run_in_doubt(body)
            case ast.Match(cases=cases):
                for case in cases:
                    self._run_in_doubt(case.body)
            case ast.Return():
                raise _Returned

    def read_module(self, module: str) -> _Names:
        """Stop if the module is torch's; return the names of one of the program's own modules."""
        words = module.lstrip(".").split(".")
        dots = len(module) - len(module.lstrip("."))
        if words[0] == "torch" and not dots:
            raise _End
        folder = os.path.dirname(str(self._names.get("__file__", ""))) if dots else self._folder
        if folder is None:
            return _Names()
        for _ in range(dots - 1):
            folder = os.path.dirname(folder)
        known = _Names()
        for count in range(1, len(words) + 1):
            stem = os.path.join(folder, *words[:count])
            for path in (os.path.join(stem, "__init__.py"), f"{stem}.py"):
                if path not in self._modules and os.path.isfile(path):
                    self._modules[path] = _Names()
                    with suppress(OSError, SyntaxError, ValueError):
                        with open(path, "rb") as file:
                            tree = ast.parse(file.read())
                        self.read_file(tree, path, ".".join(words[:count]))
                known = self._modules.get(path, known)
        return known

    # ---- what changes the environment ------------------------------------------------------

    def _assign(self, target: ast.expr, value: ast.expr | None) -> None:
        known = _Unknown if value is None else self._known(value)
        if known is _Unknown and value is not None and (name := self._full_name(value)):
            known = _Named(name)
        if (key := self._variable(target)) is not None:
            self._write(key, known, self._place(target))
        else:
            self._bind(target, known if not self._doubt else _Unknown)

    def _variable(self, target: ast.expr) -> str | None:
        """Return the variable's name if the target is ``os.environ[...]``."""
        match target:
            case ast.Subscript(value=owner, slice=key) if self._full_name(owner) == "os.environ":
                return self._text(key)
        return None

    def _write(self, name: str, value: Any, place: str) -> None:
        if self._doubt or not isinstance(value, str | None):
            self._unclear.setdefault(name, place)
            return
        self._unclear.pop(name, None)
        self._written.add(name)
        if value is None:
            self._env.pop(name, None)
        else:
            self._env[name] = value

    def _update(self, args: list[ast.expr], keywords: list[ast.keyword], place: str) -> None:
        pairs: list[tuple[Any, Any]] = []
        for arg in args:
            if isinstance(arg, ast.Dict):  # some of its values may be known, and others not
                for key, value in zip(arg.keys, arg.values, strict=True):
                    pairs.append((key and self._known(key), self._known(value)))
            else:
                with suppress(Exception):
                    pairs.extend(dict(self._value(arg)).items())
        pairs.extend((keyword.arg, self._known(keyword.value)) for keyword in keywords)
        for name, setting in pairs:
            if isinstance(name, str):
                self._write(name, setting, place)

    # ---- names -----------------------------------------------------------------------------

    def _bind(self, target: ast.expr, value: Any) -> None:
        """Bind names to their values; names with unknown values are removed."""
        match target:
            case ast.Name(id=name):
                if value is _Unknown:
                    self._names.pop(name, None)
                else:
                    self._names[name] = value
            case ast.Tuple(elts=targets) | ast.List(elts=targets):
                fits = isinstance(value, list | tuple) and len(value) == len(targets)
                for place, one in enumerate(targets):
                    self._bind(one, value[place] if fits else _Unknown)
            case ast.Subscript(value=ast.Name(id=name)):
                self._forget_contents(name)

    def _forget_contents(self, name: str) -> None:
        """Forget a value that was modified in place."""
        if _is_plain(self._names.get(name)):
            self._names.pop(name, None)

    def _place(self, node: ast.expr | ast.stmt) -> str:
        return f"{os.path.basename(str(self._names.get('__file__', '')))}:{node.lineno}"

    # ---- calls -----------------------------------------------------------------------------

    def _follow_calls(self, statement: ast.stmt) -> None:
        """Follow the calls in a statement's own expressions, not in those of its body."""
        for part in ast.iter_child_nodes(statement):
            if isinstance(part, ast.expr | ast.withitem):
                calls = [node for node in ast.walk(part) if isinstance(node, ast.Call)]
                for call in reversed(calls):  # inner calls first
                    self._call(call)

    def _call(self, call: ast.Call) -> None:
        function = self._function(call.func)
        if isinstance(function, _Function):
            self._enter(function, call)
            return
        key = self._text(call.args[0]) if call.args else None
        place = self._place(call)
        match self._full_name(call.func):
            case "os.environ.update":
                self._update(call.args, call.keywords, place)
            case "os.environ.setdefault" if key is not None and len(call.args) > 1:
                if key.startswith(_OF_A_RANK):
                    self._write(key, _Unknown, place)
                elif key not in self._env or key in self._unclear:
                    self._write(key, self._known(call.args[1]), place)
            case "os.putenv" | "os.environ.__setitem__" if key is not None and len(call.args) > 1:
                self._write(key, self._known(call.args[1]), place)
            case "os.unsetenv" | "os.environ.pop" if key is not None:
                self._write(key, None, place)
            case "importlib.import_module" | "__import__" if key is not None:
                self.read_module(key)

    def _function(self, func: ast.expr) -> object:
        match func:
            case ast.Name(id=name):
                return self._names.get(name)
            case ast.Attribute(value=ast.Name(id=owner), attr=attr):
                known = self._names.get(owner)
                if isinstance(known, _Names):
                    return known.get(attr)
                if attr not in _READING:
                    self._forget_contents(owner)
        return None

    def _enter(self, function: _Function, call: ast.Call) -> None:
        node = function.node
        if node in self._entered:
            return
        parameters = [arg.arg for arg in (*node.args.posonlyargs, *node.args.args)]
        every = [*parameters, *(arg.arg for arg in node.args.kwonlyargs)]
        outer = function.names.items()
        inner = _Names((name, value) for name, value in outer if name not in every)
        defaults = node.args.defaults
        given = dict(zip(parameters[len(parameters) - len(defaults) :], defaults, strict=True))
        given.update(zip(parameters, call.args, strict=False))
        given.update({word.arg: word.value for word in call.keywords if word.arg is not None})
        for name, value in given.items():
            with suppress(Exception):
                inner[name] = self._value(value)
        self._entered.append(node)
        doubt = self._doubt
        try:
            self._run_with(inner, node.body)
        except _Returned:
            pass
        finally:
            self._entered.pop()
            self._doubt = doubt

    # ---- values ----------------------------------------------------------------------------

    def _known(self, node: ast.expr) -> Any:
        """Return the value of an expression, or ``_Unknown``."""
        try:
            return self._value(node)
        except Exception:  # _Unknown, or what the program's values raise
            return _Unknown

    def _text(self, node: ast.expr) -> str | None:
        value = self._known(node)
        return value if isinstance(value, str) else None

    def _full_name(self, node: ast.expr) -> str | None:
        match node:
            case ast.Name(id=name):
                found = self._names.get(name, _Named(name))
                return found.name if isinstance(found, _Named) else None
            case ast.Attribute(value=value, attr=attr):
                base = self._full_name(value)
                return None if base is None else f"{base}.{attr}"
        return None

    def _value(self, node: ast.expr) -> Any:  # noqa: C901, PLR0911, PLR0912
        match node:
            case ast.Constant(value=value):
                return value
            case ast.Name(id=name) if _is_plain(self._names.get(name, node)):
                return self._names[name]
            case ast.Name() | ast.Attribute() if self._full_name(node) in self._constants:
                return self._constants[self._full_name(node) or ""]
            case ast.JoinedStr(values=parts):
                return "".join(str(self._value(part)) for part in parts)
            case ast.FormattedValue(value=value, conversion=-1, format_spec=None):
                return self._value(value)
            case ast.List(elts=items) | ast.Tuple(elts=items) | ast.Set(elts=items):
                return [self._value(item) for item in items]
            case ast.Dict(keys=keys, values=values) if all(keys):
                pairs = zip(keys, values, strict=True)
                return {self._value(k): self._value(v) for k, v in pairs if k}
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                return self._value(left) + self._value(right)
            case ast.BinOp(left=left, op=ast.BitOr(), right=right):
                return self._value(left) | self._value(right)
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                return not self._value(operand)
            case ast.BoolOp(op=op, values=values):
                result: Any = None
                for value in values:
                    result = self._value(value)
                    if bool(result) is isinstance(op, ast.Or):
                        break
                return result
            case ast.IfExp(test=test, body=body, orelse=orelse):
                return self._value(body if self._value(test) else orelse)
            case ast.Compare(left=left, ops=[op], comparators=[right]):
                return self._compare(left, op, right)
            case ast.Subscript(value=value, slice=key):
                if self._full_name(value) == "os.environ":
                    return self._looked_up(self._value(key))[0]
                return self._value(value)[self._value(key)]
            case ast.Call(func=func, args=args, keywords=keywords):
                return self._called(func, args, keywords)
        raise _Unknown

    def _called(self, func: ast.expr, args: list[ast.expr], keywords: list[ast.keyword]) -> Any:
        name = self._full_name(func)
        if name in ("os.environ.get", "os.getenv"):
            values = self._looked_up(self._value(args[0]))
            if values:
                return values[0]
            return self._value(args[1]) if len(args) > 1 else None
        given = [self._value(arg) for arg in args]
        words = {word.arg: self._value(word.value) for word in keywords if word.arg}
        if name in _PURE:
            return _PURE[name](*given, **words)
        if isinstance(func, ast.Attribute):
            owner = self._value(func.value)
            if isinstance(owner, str) or (isinstance(owner, dict) and func.attr in _READING):
                return getattr(owner, func.attr)(*given, **words)
        raise _Unknown

    def _compare(self, left: ast.expr, op: ast.cmpop, right: ast.expr) -> bool:
        first = self._value(left)
        if self._full_name(right) == "os.environ":
            second: Any = [first] if self._looked_up(first) else []
        else:
            second = self._value(right)
        return bool(_COMPARISONS[type(op)](first, second))

    def _looked_up(self, name: Any) -> list[str]:
        """Return a list with a variable's value, or an empty list if it is not set."""
        if not isinstance(name, str) or name.startswith(_OF_A_RANK) or name in self._unclear:
            raise _Unknown
        return [self._env[name]] if name in self._env else []


def _is_left_out(name: str) -> bool:
    return name in THREAD_COUNTS or name.startswith(_BY_US)


def _is_plain(value: object) -> bool:
    return isinstance(value, _PLAIN) and not isinstance(value, _Names)
