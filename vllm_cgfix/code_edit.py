"""Edits of live functions by way of their source file.

A :class:`SourceEditor` belongs to one imported module. It parses the module's source file,
makes the edits of every active fix in that tree, compiles the *whole* file, and puts the code
objects so obtained into the module's existing functions. Compiling the whole file keeps what a
function compiled alone would lose: future flags, name mangling, class cells, qualified names,
columns and line numbers. Since function objects stay the same, every by-name import, bound
method, subclass and decorator sees the edited code, and no call costs more than before.

Places in a function are named by *patterns*: a piece of Python in which ``...`` stands for
whatever may be there.

* ``...`` as an expression matches any expression; ``f(...)`` any arguments.
* ``...`` as the only statement of a block matches any block; where the pattern has no ``else``,
  with or without one.
* everything else must be the same code, formatting and comments aside.

A pattern must match exactly once in the function, otherwise the edit is refused.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType, FunctionType, ModuleType
from typing import Any, Protocol, TypeVar

_FunctionNode = (ast.FunctionDef, ast.AsyncFunctionDef)


class EditRefused(Exception):
    """An edit cannot be made here; the message is the reason, in a sentence."""


# --- patterns ---------------------------------------------------------------------------------


def _is_blank(node: object) -> bool:
    return isinstance(node, ast.Constant) and node.value is ...


def _is_blank_block(body: object) -> bool:
    return (
        isinstance(body, list)
        and len(body) == 1
        and isinstance(body[0], ast.Expr)
        and _is_blank(body[0].value)
    )


def matches(pattern: object, node: object) -> bool:
    """Whether a tree is what a pattern's tree describes (see the module's text)."""
    if _is_blank(pattern) and isinstance(node, ast.expr):
        return True
    if _is_blank_block(pattern):
        return isinstance(node, list) and bool(node)
    if isinstance(pattern, list):
        return (
            isinstance(node, list)
            and len(pattern) == len(node)
            and all(map(matches, pattern, node))
        )
    if not isinstance(pattern, ast.AST):
        return type(pattern) is type(node) and pattern == node
    if type(pattern) is not type(node):
        return False
    skipped = {"ctx", "type_comment", "kind"}
    if isinstance(pattern, ast.Call) and len(pattern.args) == 1 and _is_blank(pattern.args[0]):
        skipped |= {"args", "keywords"}
    if _is_blank_block(getattr(pattern, "body", None)) and not getattr(pattern, "orelse", None):
        skipped |= {"orelse"}
    return all(
        matches(getattr(pattern, name), getattr(node, name, None))
        for name in pattern._fields
        if name not in skipped
    )


def _statements(source: str) -> list[ast.stmt]:
    return ast.parse(source).body


def _expression(source: str) -> ast.expr:
    return ast.parse(source, mode="eval").body


def _blocks(root: ast.AST) -> Iterator[list[ast.stmt]]:
    """Every list of statements at any depth below ``root``."""
    for node in ast.walk(root):
        for _, value in ast.iter_fields(node):
            if isinstance(value, list) and value and isinstance(value[0], ast.stmt):
                yield value


_T = TypeVar("_T")


def _only(found: Sequence[_T], pattern: str) -> _T:
    if len(found) != 1:
        short = " ".join(pattern.split())
        raise EditRefused(f"expected one place like `{short}`, found {len(found)}")
    return found[0]


def _find_statements(root: ast.AST, pattern: str) -> tuple[list[ast.stmt], int, int]:
    """The block that holds the statements of a pattern in a row, and their range in it."""
    wanted = _statements(pattern)
    found = [
        (block, start, start + len(wanted))
        for block in _blocks(root)
        for start in range(len(block) - len(wanted) + 1)
        if matches(wanted, block[start : start + len(wanted)])
    ]
    return _only(found, pattern)


def _placed_at(source: str, place: ast.stmt) -> list[ast.stmt]:
    """New statements that claim the line of ``place``: a traceback through them points there."""
    statements = _statements(source)
    for statement in statements:
        for node in ast.walk(statement):
            ast.copy_location(node, place)
    return statements


# --- the general edits of a function ----------------------------------------------------------


class Step(Protocol):
    """One change of a function's tree."""

    def apply(self, function: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        """Make the change in place.

        Raises:
            EditRefused: the place is not there, or there more than once.
        """


@dataclass(frozen=True)
class Move:
    """Move the statements of one pattern to just before those of another."""

    statements: str
    before: str

    def apply(self, function: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        block, start, stop = _find_statements(function, self.statements)
        moved = block[start:stop]
        _find_statements(function, self.before)
        del block[start:stop]
        if not block:
            raise EditRefused(f"nothing would be left around `{self.statements}`")
        target, at, _ = _find_statements(function, self.before)
        target[at:at] = moved


@dataclass(frozen=True)
class Insert:
    """Insert statements before or after those of a pattern."""

    code: str
    before: str | None = None
    after: str | None = None

    def apply(self, function: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        place = self.before if self.before is not None else self.after
        assert place is not None, "Insert needs a place"
        block, start, stop = _find_statements(function, place)
        at = start if self.before is not None else stop
        block[at:at] = _placed_at(self.code, block[start])


@dataclass(frozen=True)
class Wrap:
    """Put the statements of a pattern inside ``with CONTEXT:``."""

    statements: str
    context: str

    def apply(self, function: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        block, start, stop = _find_statements(function, self.statements)
        (wrapper,) = _placed_at(f"with {self.context}: pass", block[start])
        assert isinstance(wrapper, ast.With)
        wrapper.body = block[start:stop]
        block[start:stop] = [wrapper]


@dataclass(frozen=True)
class Rename:
    """Read other names than before, from the statements of a pattern to the end of their block.

    ``names`` maps a name to the expression that is read in its place. Names that are written
    there are left alone, and refused if they are to be renamed.
    """

    start: str
    names: Mapping[str, str]

    def apply(self, function: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        block, start, _ = _find_statements(function, self.start)
        block[start:] = [_Renamer(self.names).visit(statement) for statement in block[start:]]


class _Renamer(ast.NodeTransformer):
    def __init__(self, names: Mapping[str, str]):
        self.names = names

    def visit_Name(self, node: ast.Name) -> ast.expr:
        if node.id not in self.names:
            return node
        if not isinstance(node.ctx, ast.Load):
            raise EditRefused(f"`{node.id}` is assigned where it was only read")
        new = _expression(self.names[node.id])
        for part in ast.walk(new):
            ast.copy_location(part, node)
        return new


@dataclass(frozen=True)
class EditFunction:
    """The steps for one function, named as in ``"Class.method"``."""

    qualname: str
    steps: tuple[Step, ...]

    def apply(self, tree: ast.Module) -> None:
        """Make every step in the file's tree.

        Raises:
            EditRefused: the function is not there exactly once, or a step is refused.
        """
        function = find_function(tree, self.qualname)
        for step in self.steps:
            try:
                step.apply(function)
            except EditRefused as reason:
                raise EditRefused(f"structure differs in {self.qualname}: {reason}") from None


Edit = EditFunction
"""What a fix may list for a file."""


def find_function(tree: ast.Module, qualname: str) -> ast.FunctionDef | ast.AsyncFunctionDef:
    """The definition of a function or method in a file's tree.

    Raises:
        EditRefused: it is not there exactly once.
    """
    nodes: list[ast.AST] = [tree]
    for name in qualname.split("."):
        nodes = [
            child
            for node in nodes
            for child in ast.iter_child_nodes(node)
            if isinstance(child, (*_FunctionNode, ast.ClassDef)) and child.name == name
        ]
    found = [node for node in nodes if isinstance(node, _FunctionNode)]
    return _only(found, f"def {qualname}")


# --- live functions ---------------------------------------------------------------------------


def unwrap(member: object, where: str) -> tuple[FunctionType, list[object]]:
    """The innermost function of a class or module member, and the wrappers around it.

    Raises:
        EditRefused: a wrapper does not say what it wraps.
    """
    wrappers: list[object] = []
    while isinstance(member, (staticmethod, classmethod)) or hasattr(member, "__wrapped__"):
        wrappers.append(member)
        wrapped = getattr(member, "__wrapped__", None)
        member = getattr(member, "__func__", None) if wrapped is None else wrapped
        if member in wrappers:
            raise EditRefused(f"{where} is wrapped around itself")
    if not isinstance(member, FunctionType):
        raise EditRefused(
            f"{where} has been replaced by {_describe(member)}, which does not say what it wraps"
        )
    return member, wrappers


def _describe(member: object) -> str:
    code = getattr(member, "__code__", None)
    if isinstance(code, CodeType):
        return f"{member!r} from {code.co_filename}:{code.co_firstlineno}"
    return f"a {type(member).__module__}.{type(member).__qualname__}"


def _member(module: ModuleType, qualname: str) -> object:
    owner: Any = module
    *path, name = qualname.split(".")
    try:
        for part in path:
            owner = owner.__dict__[part]
        return owner.__dict__[name]
    except (KeyError, AttributeError):
        raise EditRefused(f"{module.__name__} has no {qualname}") from None


def _find_code(module_code: CodeType, qualname: str, first_line: int) -> CodeType:
    """The code object of a function in the code of its file.

    Found by the path of names, since Python 3.10 has no ``co_qualname``, and by first line,
    since a name can be defined twice.
    """
    found = [module_code]
    for name in qualname.split("."):
        found = [
            constant
            for code in found
            for constant in code.co_consts
            if isinstance(constant, CodeType) and constant.co_name == name
        ]
    return _only([code for code in found if code.co_firstlineno == first_line], qualname)


def _compile(tree: ast.Module, filename: str) -> CodeType:
    return compile(tree, filename, "exec", dont_inherit=True, optimize=sys.flags.optimize)


@dataclass
class _Target:
    """A live function that some fix edits, and what it was before.

    ``edited`` is the code object that the editor put there last; None while it is stock.
    """

    qualname: str
    function: FunctionType
    stock: CodeType
    foreign_wrappers: list[str]
    edited: CodeType | None = None


class SourceEditor:
    """The edits of one imported module: those of all active fixes, made together.

    Whenever the set of active fixes changes, the stock source is edited afresh with all of
    them in the catalogue's order, so that the order of applying and undoing cannot matter.
    """

    def __init__(self, module: ModuleType, filename: str, sha256: str):
        """Take the module whose source is ``filename`` with that hash, as it is live.

        Raises:
            EditRefused: the file cannot be read or is not the one that was decided on, or the
                module comes from elsewhere.
        """
        self.module = module
        origin = getattr(module.__spec__, "origin", None)
        if origin is None or os.path.realpath(origin) != os.path.realpath(filename):
            raise EditRefused(f"{module.__name__} was loaded from {origin}, not from {filename}")
        try:
            with open(filename, "rb") as file:
                source = file.read()
        except OSError as error:
            raise EditRefused(f"{filename} cannot be read: {error.strerror}") from None
        if hashlib.sha256(source).hexdigest() != sha256:
            raise EditRefused(f"{filename} has changed since the fix was decided on")
        self.filename = filename
        self._source = source
        self._targets: dict[str, _Target] = {}
        self._active: dict[str, tuple[Edit, ...]] = {}

    def set_active(self, edits: Mapping[str, tuple[Edit, ...]]) -> None:
        """Make the live functions those of the stock source with exactly these edits.

        Args:
            edits: fix id to its edits of this module, in the order in which to make them.

        Raises:
            EditRefused: nothing has changed.
        """
        new = self._edited_code(edits) if edits else {}
        for target in self._targets.values():
            code = new.get(target.qualname)
            target.function.__code__ = code or target.stock
            target.edited = code
        self._active = dict(edits)

    def _edited_code(self, edits: Mapping[str, tuple[Edit, ...]]) -> dict[str, CodeType]:
        """The code objects of all functions that the edits change, by qualified name."""
        # Parsed anew each time: a tree is of use once, and larger than its source by far.
        tree = ast.parse(self._source, self.filename)
        in_order = [edit for fix_edits in edits.values() for edit in fix_edits]
        targets = self._checked_targets(tree, [edit.qualname for edit in in_order])
        for edit in in_order:
            edit.apply(tree)
        edited_file = _compile(ast.fix_missing_locations(tree), self.filename)
        new = {}
        for qualname, target in targets.items():
            code = _find_code(edited_file, qualname, target.stock.co_firstlineno)
            if code.co_freevars != target.stock.co_freevars:
                raise EditRefused(f"the edit of {qualname} would change its free variables")
            new[qualname] = code
        self._targets.update(targets)
        return new

    def _checked_targets(self, tree: ast.Module, qualnames: Sequence[str]) -> dict[str, _Target]:
        """The live functions of these names, checked to be what the source file says."""
        stock_file: CodeType | None = None
        targets: dict[str, _Target] = {}
        for qualname in qualnames:
            target = self._targets.get(qualname)
            if target is None or self._live_code(target) is not (target.edited or target.stock):
                # Not seen before, or replaced since, by a reload for one.
                stock_file = stock_file or _compile(tree, self.filename)
                target = self._new_target(tree, stock_file, qualname)
            targets[qualname] = target
        return targets

    def _new_target(self, tree: ast.Module, stock_file: CodeType, qualname: str) -> _Target:
        where = f"{self.module.__name__}.{qualname}"
        definition = find_function(tree, qualname)
        decorators = definition.decorator_list
        function, wrappers = unwrap(_member(self.module, qualname), where)
        first_line = min([definition.lineno, *(node.lineno for node in decorators)])
        if function.__code__ != _find_code(stock_file, qualname, first_line):
            raise EditRefused(
                f"the running code of {where} is not that of {self.filename}, "
                f"but {_describe(function)}: a stale .pyc file or another patch"
            )
        # What is around the function beyond the decorators of its own source came later.
        foreign = wrappers[: max(0, len(wrappers) - len(decorators))]
        return _Target(qualname, function, function.__code__, [*map(_describe, foreign)])

    def _live_code(self, target: _Target) -> CodeType | None:
        """The code behind the module's name now: not the target's own where it was replaced."""
        try:
            member = _member(self.module, target.qualname)
            return unwrap(member, target.qualname)[0].__code__
        except EditRefused:
            return None

    def is_live(self, edits: Sequence[Edit]) -> bool:
        """Whether the functions of these edits still run the code that was put there."""
        return all(
            (target := self._targets.get(edit.qualname)) is not None
            and target.edited is not None
            and self._live_code(target) is target.edited
            for edit in edits
        )

    def foreign_wrappers(self, edits: Sequence[Edit]) -> list[str]:
        """What was wrapped around the functions of these edits before they were edited."""
        return [
            f"{edit.qualname} edited beneath {wrapper}"
            for edit in edits
            if edit.qualname in self._targets
            for wrapper in self._targets[edit.qualname].foreign_wrappers
        ]

    @property
    def active(self) -> Mapping[str, tuple[Edit, ...]]:
        """Fix id to its edits, of the fixes whose edits are in the live functions."""
        return self._active


def raise_when_called(
    module: ModuleType, qualname: str, make_error: Callable[[], Exception]
) -> None:
    """Put a function in the place of ``qualname`` that raises on every call.

    For a refusal that must stop the process but is found inside an import, which a plugin
    must never break.
    """

    def refuse(*args: object, **kwargs: object) -> None:
        raise make_error()

    *path, name = qualname.split(".")
    owner: Any = module
    with contextlib.suppress(AttributeError):
        for part in path:
            owner = getattr(owner, part)
        refuse.__qualname__ = qualname
        setattr(owner, name, refuse)
