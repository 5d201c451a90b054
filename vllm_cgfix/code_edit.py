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

A pattern must match exactly once in the function, and so must each of its statements: otherwise
the edit is refused.
"""

from __future__ import annotations

import ast
import builtins
import copy
import dataclasses
import hashlib
import itertools
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import CodeType, FunctionType, ModuleType
from typing import Any, ClassVar, Protocol, TypeVar

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


_HAVE_STATEMENTS = (ast.stmt, ast.excepthandler, ast.match_case)


def _blocks(root: ast.AST) -> Iterator[list[ast.stmt]]:
    """Every list of statements at any depth below ``root``."""
    pending = [root]
    while pending:
        for _, value in ast.iter_fields(pending.pop()):
            # No expression has statements in it, and most of a tree is expressions.
            if isinstance(value, list) and value and isinstance(value[0], _HAVE_STATEMENTS):
                pending += value
                if isinstance(value[0], ast.stmt):
                    yield value


_T = TypeVar("_T")


def _unexpected(pattern: str, found: int, expected: int) -> EditRefused:
    places = "one place" if expected == 1 else f"{expected} places"
    return EditRefused(f"expected {places} like `{' '.join(pattern.split())}`, found {found}")


def _only(found: Sequence[_T], pattern: str) -> _T:
    if len(found) != 1:
        raise _unexpected(pattern, len(found), 1)
    return found[0]


_Place = tuple[list[ast.stmt], int, int]
"""A block, and where in it statements begin and end."""


def _all_statements(roots: Iterable[ast.AST], pattern: str) -> list[_Place]:
    """Every block that holds the statements of a pattern in a row, and their range in it."""
    wanted = _statements(pattern)
    return [
        (block, start, start + len(wanted))
        for root in roots
        for block in _blocks(root)
        for start in range(len(block) - len(wanted) + 1)
        if matches(wanted, block[start : start + len(wanted)])
    ]


def _find_statements(root: ast.AST, pattern: str) -> _Place:
    place = _only(_all_statements([root], pattern), pattern)
    _refuse_copies(root, _statements(pattern), pattern)
    return place


def _refuse_copies(root: ast.AST, statements: Iterable[ast.stmt], pattern: str) -> None:
    """Refuse a copy of a statement elsewhere, which would run as well, and unedited."""
    everywhere = [statement for block in _blocks(root) for statement in block]
    for wanted in statements:
        _only([statement for statement in everywhere if matches(wanted, statement)], pattern)


def _in_order(node: ast.AST) -> Iterator[ast.AST]:
    """A node and all below it, outer ones first, in the order of the source."""
    yield node
    for child in ast.iter_child_nodes(node):
        yield from _in_order(child)


def _bound(nodes: Iterable[ast.AST]) -> set[str]:
    """The names to which nodes, less their children, give a value or another scope."""
    names: set[str | None] = set()
    for node in nodes:
        if isinstance(node, ast.Name):
            names.add(None if isinstance(node.ctx, ast.Load) else node.id)
        elif isinstance(node, ast.alias):
            names.add((node.asname or node.name).split(".")[0])
        elif isinstance(node, ast.arg):
            names.add(node.arg)
        elif isinstance(node, (ast.Global, ast.Nonlocal)):
            names.update(node.names)
        else:  # definitions, exception handlers and the patterns of a match statement
            names |= {getattr(node, "name", None), getattr(node, "rest", None)}
    return {name for name in names if name is not None}


def _read(nodes: Iterable[ast.AST]) -> set[str]:
    return {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}


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
class Expect:
    """Change nothing, but refuse where there are more or fewer places like a pattern.

    This is for alternatives: what is so only in the releases that one of them is for.
    """

    statements: str
    times: int = 1

    def apply(self, function: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        """Make the check, as :class:`Step` says."""
        found = _all_statements([function], self.statements)
        if len(found) != self.times:
            raise _unexpected(self.statements, len(found), self.times)


@dataclass(frozen=True)
class Move:
    """Move the statements of one pattern up, to just before those of another.

    They may leave ``with`` blocks, but no others, and enter none: out of an ``if`` or a loop
    they would not run as often as before. What they read must have its value there already.
    """

    statements: str
    before: str

    def apply(self, function: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        """Make the change in place, as :class:`Step` says."""
        block, start, stop = _find_statements(function, self.statements)
        target, at, _ = _find_statements(function, self.before)
        moved = block[start:stop]
        short = " ".join(self.before.split())
        if not any(_holds(statement, moved[0]) for statement in target[at:]):
            raise EditRefused(f"there is no way by `with` blocks alone up to `{short}`")
        below = (node for statement in target[at:] for node in _in_order(statement))
        passed = itertools.takewhile(lambda node: node is not moved[0], below)
        late = _bound(passed) & _read(node for s in moved for node in ast.walk(s))
        if late:
            raise EditRefused(f"`{min(late)}` does not have its value yet at `{short}`")
        del block[start:stop]
        if not block:
            raise EditRefused(f"nothing would be left around `{self.statements}`")
        target[at:at] = moved


def _holds(statement: ast.stmt, inner: ast.stmt) -> bool:
    """Whether a statement is ``inner``, or has it in its ``with`` block or one within that."""
    return statement is inner or (
        isinstance(statement, ast.With) and any(_holds(child, inner) for child in statement.body)
    )


@dataclass(frozen=True)
class Insert:
    """Insert statements before or after those of a pattern."""

    code: str
    before: str | None = None
    after: str | None = None

    def apply(self, function: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        """Make the change in place, as :class:`Step` says."""
        place = self.before if self.before is not None else self.after
        assert place is not None, "Insert needs a place"
        block, start, stop = _find_statements(function, place)
        at = start if self.before is not None else stop
        block[at:at] = _placed_at(self.code, block[start])


@dataclass(frozen=True)
class Wrap:
    """Put the statements of a pattern inside ``with CONTEXT:``.

    There must be as many of them as ``times`` says, each of which is wrapped. Where ``within`` is
    given, they must all be below the statements of that pattern; where ``after`` is given, right
    after those.
    """

    statements: str
    context: str
    times: int = 1
    within: str | None = None
    after: str | None = None

    def apply(self, function: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        """Make the change in place, as :class:`Step` says."""
        found = everywhere = _all_statements([function], self.statements)
        if self.within is not None:
            block, start, stop = _find_statements(function, self.within)
            found = _all_statements(block[start:stop], self.statements)
        if self.after is not None:
            found = [_right_after(function, self.after, self.statements)]
        for places in (everywhere, found):
            if len(places) != self.times:
                raise _unexpected(self.statements, len(places), self.times)
        # From the last to the first: wrapping moves what comes after in the same block.
        for place in reversed(found):
            _put_below(f"with {self.context}", place)


@dataclass(frozen=True)
class Guard:
    """Put the statements of a pattern inside ``if CONDITION:``.

    They must come right after the statements of ``after``, at one place, and none of them may be
    elsewhere, too. Nor may they give a value to a name, which could then be read without one.
    """

    statements: str
    condition: str
    after: str

    def apply(self, function: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        """Make the change in place, as :class:`Step` says."""
        block, start, stop = _right_after(function, self.after, self.statements)
        nodes = [node for statement in block[start:stop] for node in ast.walk(statement)]
        inner = [node for node in nodes if isinstance(node, ast.stmt)]
        _refuse_copies(function, inner, self.statements)
        set_here = _bound(nodes)
        if set_here:
            raise EditRefused(f"`{min(set_here)}` would not always get its value")
        _put_below(f"if {self.condition}", (block, start, stop))


def _right_after(root: ast.AST, before: str, pattern: str) -> _Place:
    """The statements of a pattern, which must come right after those of another."""
    block, start, stop = _find_statements(root, f"{before}\n{pattern}")
    return block, start + len(_statements(before)), stop


def _put_below(header: str, place: _Place) -> None:
    """Put statements into a new ``with`` or ``if`` of their own."""
    block, start, stop = place
    (outer,) = _placed_at(f"{header}: pass", block[start])
    assert isinstance(outer, (ast.With, ast.If))
    outer.body = block[start:stop]
    block[start:stop] = [outer]


@dataclass(frozen=True)
class Rename:
    """Read other names than before, from the statements of a pattern to the end of their block.

    ``names`` maps a name to the expression that is read in its place. Names that are written
    there are left alone, and refused if they are to be renamed.
    """

    start: str
    names: Mapping[str, str]

    def apply(self, function: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        """Make the change in place, as :class:`Step` says."""
        block, start, _ = _find_statements(function, self.start)
        set_here = _bound(node for s in block[start:] for node in ast.walk(s)) & {*self.names}
        if set_here:
            raise EditRefused(f"`{min(set_here)}` is assigned where it was only read")
        block[start:] = [_Renamer(self.names).visit(statement) for statement in block[start:]]


class _Renamer(ast.NodeTransformer):
    def __init__(self, names: Mapping[str, str]):
        self.names = names

    def visit_Name(self, node: ast.Name) -> ast.expr:
        """The expression that is read in the place of a name."""
        if node.id not in self.names:
            return node
        new = _expression(self.names[node.id])
        for part in ast.walk(new):
            ast.copy_location(part, node)
        return new


@dataclass(frozen=True)
class Replace:
    """Put another expression in the place of the one that a pattern describes.

    Where ``within`` is given, only the statements of that pattern are searched. In ``by``, ``...``
    stands for the expression that was there. What is given a value can be replaced, too.
    """

    expression: str
    by: str
    within: str | None = None

    def apply(self, function: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        """Make the change in place, as :class:`Step` says."""
        roots: list[ast.stmt] = function.body
        if self.within is not None:
            block, start, stop = _find_statements(function, self.within)
            roots = block[start:stop]
        wanted = _expression(self.expression)
        parents = [node for root in roots for node in ast.walk(root)]
        found = [
            (parent, name, index, child)
            for parent in parents
            for name, index, child in _expressions_of(parent)
            if matches(wanted, child)
        ]
        parent, name, index, old = _only(found, self.expression)
        new = _Filler(old).visit(_expression(self.by))
        if isinstance(getattr(old, "ctx", None), ast.Store):
            if not hasattr(new, "ctx"):
                raise EditRefused(f"`{self.by}` cannot be given a value")
            new.ctx = old.ctx  # type: ignore[attr-defined]
        if index is None:
            setattr(parent, name, new)
        else:
            getattr(parent, name)[index] = new


def _expressions_of(node: ast.AST) -> Iterator[tuple[str, int | None, ast.expr]]:
    """The expressions directly below a node: field, index in a list or None, expression."""
    for name, value in ast.iter_fields(node):
        if isinstance(value, ast.expr):
            yield name, None, value
        elif isinstance(value, list):
            for index, item in enumerate(value):
                if isinstance(item, ast.expr):
                    yield name, index, item


class _Filler(ast.NodeTransformer):
    """Puts an expression in the place of each ``...``, and its line on everything around it."""

    def __init__(self, old: ast.expr):
        self.old = old

    def visit(self, node: ast.AST) -> Any:
        """The old expression for ``...``, and any other node on its line."""
        if _is_blank(node):
            return self.old
        return ast.copy_location(self.generic_visit(node), self.old)


@dataclass(frozen=True)
class AddKeyword:
    """Pass one more keyword argument in the call that a pattern describes."""

    call: str
    keyword: str
    value: str

    def apply(self, function: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        """Make the change in place, as :class:`Step` says."""
        wanted = _expression(self.call)
        found = [node for node in ast.walk(function) if matches(wanted, node)]
        call = _only(found, self.call)
        assert isinstance(call, ast.Call), "AddKeyword needs the pattern of a call"
        if any(keyword.arg in (self.keyword, None) for keyword in call.keywords):
            raise EditRefused(f"`{self.call}` may pass {self.keyword} already")
        value = _expression(self.value)
        for part in ast.walk(value):
            ast.copy_location(part, call)
        call.keywords.append(ast.copy_location(ast.keyword(self.keyword, value), call))


@dataclass(frozen=True)
class AddParameter:
    """Give the function one more parameter, the last, with a constant as its default."""

    name: str
    default: bool | int | str | None

    def apply(self, function: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        """Make the change in place, as :class:`Step` says."""
        parameters = function.args
        if parameters.vararg or parameters.kwonlyargs or parameters.kwarg:
            raise EditRefused("there are parameters behind the last positional one")
        _refuse_taken({self.name}, function)
        parameters.args.append(ast.copy_location(ast.arg(self.name), function))
        parameters.defaults.append(ast.copy_location(ast.Constant(self.default), function))


def _refuse_taken(names: Iterable[str], function: ast.AST) -> None:
    """Refuse names of our own that a function uses, for something else or for the same."""
    nodes = list(ast.walk(function))
    taken = (_bound(nodes) | _read(nodes)) & {*names}
    if taken:
        raise EditRefused(f"it uses the name `{min(taken)}` already")


@dataclass(frozen=True)
class EditFunction:
    """The steps for one function, named as in ``"Class.method"``.

    ``imports`` are import statements for what the new code uses; they are put at the top of the
    function, so that the module's namespace stays as it is.
    """

    qualname: str
    steps: tuple[Step, ...]
    imports: str = ""

    def apply(self, tree: ast.Module) -> None:
        """Make every step in the file's tree.

        Raises:
            EditRefused: the function is not there exactly once, or a step is refused.
        """
        function = find_function(tree, self.qualname)
        before = _free_names(function)
        imports = _statements(self.imports)
        try:
            _refuse_taken(_bound(n for s in imports for n in ast.walk(s)), function)
            for step in self.steps:
                step.apply(function)
            if imports:
                at = 0 if ast.get_docstring(function, clean=False) is None else 1
                function.body[at:at] = _placed_at(self.imports, function.body[at])
            # What new code reads must be there: a variable's name is part of the structure.
            new = _free_names(function) - before
            unknown = new and new - {*dir(builtins)} - _bound(_module_level(tree))
            if unknown:
                raise EditRefused(f"there is no `{min(unknown)}`")
        except EditRefused as reason:
            raise EditRefused(f"structure differs in {self.qualname}: {reason}") from None

    @property
    def added_defaults(self) -> tuple[object, ...]:
        """The defaults of the parameters that the steps add."""
        return tuple(step.default for step in self.steps if isinstance(step, AddParameter))


def _free_names(function: ast.AST) -> set[str]:
    """The names that a function reads and never binds."""
    nodes = list(ast.walk(function))
    return _read(nodes) - _bound(nodes)


def _module_level(tree: ast.Module) -> Iterator[ast.AST]:
    """The nodes of a file that are not within a function or class."""
    pending: list[ast.AST] = [*tree.body]
    while pending:
        node = pending.pop()
        yield node
        if not isinstance(node, (*_FunctionNode, ast.ClassDef)):
            pending.extend(ast.iter_child_nodes(node))


@dataclass(frozen=True)
class AddField:
    """Give a dataclass one more field, the last, with a constant as its default."""

    qualname: str
    name: str
    type: type
    default: object

    def apply(self, tree: ast.Module) -> None:
        """Add the field in the file's tree.

        Raises:
            EditRefused: the class is not there exactly once, or has the field already.
        """
        definition = _find_definition(tree, self.qualname, (ast.ClassDef,), "class")
        assert isinstance(definition, ast.ClassDef)
        if self.name in _bound(ast.walk(definition)):
            raise EditRefused(f"structure differs in {self.qualname}: it has {self.name} already")
        definition.body += _placed_at(
            f"{self.name}: {self.type.__name__} = {self.default!r}", definition.body[-1]
        )


@dataclass(frozen=True)
class Unchanged:
    """A function that needs no change in some releases: an alternative for them.

    Its body, less a docstring, must be what the pattern says.
    """

    qualname: str
    body: str

    def apply(self, tree: ast.Module) -> None:
        """Check the function in the file's tree.

        Raises:
            EditRefused: it is not there exactly once, or its body is another.
        """
        function = find_function(tree, self.qualname)
        first = 0 if ast.get_docstring(function, clean=False) is None else 1
        if not matches(_statements(self.body), function.body[first:]):
            short = " ".join(self.body.split())
            raise EditRefused(f"structure differs in {self.qualname}: its body is not `{short}`")


@dataclass(frozen=True)
class OneOf:
    """Alternatives for releases that do the same thing in different ways.

    Exactly one of them must be possible; it is the one that is made.
    """

    alternatives: tuple[tuple[EditFunction | AddField | Unchanged, ...], ...]


Edit = EditFunction | AddField | OneOf
"""What a fix may list for a file."""


def resolve(edits: Sequence[Edit], tree: ast.Module) -> list[EditFunction | AddField]:
    """The edits with each choice made.

    Raises:
        EditRefused: none of the alternatives is possible in this tree, or several are.
    """
    made: list[EditFunction | AddField] = []
    for edit in edits:
        if not isinstance(edit, OneOf):
            made.append(edit)
            continue
        possible, reasons = [], []
        for alternative in edit.alternatives:
            trial = _copy_for_trial(tree, alternative)
            try:
                for part in alternative:
                    part.apply(trial)
            except EditRefused as reason:
                reasons.append(str(reason))
            else:
                possible.append(alternative)
        if len(possible) != 1:
            raise EditRefused(
                "; ".join(reasons) if not possible else "structure fits several alternatives"
            )
        made += [part for part in possible[0] if not isinstance(part, Unchanged)]
    return made


def function_names(edits: Sequence[Edit | Unchanged]) -> list[str]:
    """The qualified names of all functions that edits are for, in any of their alternatives."""
    names: list[str] = []
    for edit in edits:
        if isinstance(edit, OneOf):
            names += [name for parts in edit.alternatives for name in function_names(parts)]
        elif isinstance(edit, EditFunction):
            names.append(edit.qualname)
    return names


def _copy_for_trial(
    tree: ast.Module, edits: Sequence[EditFunction | AddField | Unchanged]
) -> ast.Module:
    """A tree of which only what the edits touch is a copy: copying a whole class takes long."""
    paths = [edit.qualname.split(".") for edit in edits]
    return ast.Module(_copied(tree.body, paths), type_ignores=[])


def _copied(body: Sequence[ast.stmt], paths: Sequence[Sequence[str]]) -> list[ast.stmt]:
    """Statements, of which the definitions at these paths are copies."""
    copied: list[ast.stmt] = []
    for node in body:
        below = [path[1:] for path in paths if path[0] == getattr(node, "name", None)]
        if isinstance(node, ast.ClassDef) and below and all(below):
            node = copy.copy(node)
            node.body = _copied(node.body, below)
        elif below:
            node = copy.deepcopy(node)
        copied.append(node)
    return copied


def field_names(definition: ast.ClassDef) -> list[str]:
    """The names of the annotated attributes of a class, in order."""
    return [
        node.target.id
        for node in definition.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    ]


def _find_definition(
    tree: ast.Module, qualname: str, kinds: tuple[type[ast.AST], ...], word: str
) -> ast.AST:
    nodes: list[ast.AST] = [tree]
    for name in qualname.split("."):
        nodes = [
            child
            for node in nodes
            for child in ast.iter_child_nodes(node)
            if isinstance(child, (*_FunctionNode, ast.ClassDef)) and child.name == name
        ]
    return _only([node for node in nodes if isinstance(node, kinds)], f"{word} {qualname}")


def find_function(tree: ast.Module, qualname: str) -> ast.FunctionDef | ast.AsyncFunctionDef:
    """The definition of a function or method in a file's tree.

    Raises:
        EditRefused: it is not there exactly once.
    """
    found = _find_definition(tree, qualname, _FunctionNode, "def")
    assert isinstance(found, _FunctionNode)
    return found


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


class _LiveFunction:
    """A function that some fix edits, and what it was before."""

    def __init__(self, qualname: str, function: FunctionType, foreign_wrappers: list[str]):
        self.qualname = qualname
        self.function = function
        self.foreign_wrappers = foreign_wrappers
        self.stock = function.__code__
        self.stock_defaults = function.__defaults__
        self.edited: CodeType | None = None

    @classmethod
    def check(
        cls, module: ModuleType, qualname: str, tree: ast.Module, stock_file: CodeType
    ) -> _LiveFunction:
        """Take the function that has this name now.

        Raises:
            EditRefused: it is not what the source file says.
        """
        where = f"{module.__name__}.{qualname}"
        definition = find_function(tree, qualname)
        decorators = definition.decorator_list
        function, wrappers = unwrap(_member(module, qualname), where)
        first_line = min([definition.lineno, *(node.lineno for node in decorators)])
        if function.__code__ != _find_code(stock_file, qualname, first_line):
            raise EditRefused(
                f"the running code of {where} is not that of {stock_file.co_filename}, "
                f"but {_describe(function)}: a stale .pyc file or another patch"
            )
        # What is around the function beyond the decorators of its own source came later.
        foreign = wrappers[: max(0, len(wrappers) - len(decorators))]
        return cls(qualname, function, [*map(_describe, foreign)])

    def new_content(
        self, edits: Sequence[EditFunction | AddField], edited_file: CodeType
    ) -> tuple[CodeType, tuple[object, ...]]:
        """The code object with these edits, and the defaults of the parameters they add."""
        code = _find_code(edited_file, self.qualname, self.stock.co_firstlineno)
        if code.co_freevars != self.stock.co_freevars:
            raise EditRefused(f"the edit of {self.qualname} would change its free variables")
        added: tuple[object, ...] = ()
        for edit in edits:
            if isinstance(edit, EditFunction) and edit.qualname == self.qualname:
                added += edit.added_defaults
        return code, added

    def install(self, content: tuple[CodeType, tuple[object, ...]] | None) -> None:
        """Put new content into the function, or its stock content back (None).

        Code that somebody else has put there since is left alone.
        """
        if self.function.__code__ is not (self.edited or self.stock):
            self.edited = None
            return
        code, added = content or (self.stock, ())
        defaults = (*(self.stock_defaults or ()), *added) if added else self.stock_defaults
        # Defaults must never outnumber the parameters, not even for the time between the two.
        if code.co_argcount >= self.function.__code__.co_argcount:
            self.function.__code__ = code
            self.function.__defaults__ = defaults
        else:
            self.function.__defaults__ = defaults
            self.function.__code__ = code
        self.edited = code if content else None

    def is_current(self, module: ModuleType) -> bool:
        """Whether the module's name still leads to this function and the code put there."""
        try:
            live, _ = unwrap(_member(module, self.qualname), self.qualname)
        except EditRefused:
            return False
        return live.__code__ is (self.edited or self.stock)


class _LiveDataclass:
    """A dataclass that some fix adds fields to, and what it was before."""

    # What dataclass() makes out of the fields: a second run keeps what is there already.
    _GENERATED = ("__init__", "__repr__", "__eq__", "__match_args__", "__replace__")
    _RECORDS = ("__doc__", "__dataclass_fields__", "__dataclass_params__")
    # What a copy of the class must not have from it.
    _OF_THE_CLASS = (
        *("__dict__", "__weakref__", "__annotations__"),
        *("__annotate__", "__annotate_func__", "__annotations_cache__"),
    )
    foreign_wrappers: ClassVar[list[str]] = []

    def __init__(self, qualname: str, owner: type):
        self.qualname = qualname
        self.owner = owner
        self.edited = False
        self._undo: dict[str, object] = {}
        self._left = self._generated()

    @classmethod
    def check(cls, module: ModuleType, qualname: str, tree: ast.Module) -> _LiveDataclass:
        """Take the class that has this name now.

        Raises:
            EditRefused: it is not the plain dataclass that the source file says.
        """
        owner = _member(module, qualname)
        definition = _find_definition(tree, qualname, (ast.ClassDef,), "class")
        assert isinstance(definition, ast.ClassDef)
        if not isinstance(owner, type) or "__dataclass_fields__" not in vars(owner):
            raise EditRefused(f"{qualname} is {_describe(owner)}, not a dataclass")
        decorators = [ast.unparse(decorator) for decorator in definition.decorator_list]
        own = _bound(ast.walk(definition)) & {*cls._GENERATED, "__slots__"}
        if decorators != ["dataclass"] or own or owner.__bases__ != (object,):
            raise EditRefused(f"{qualname} is not a plain dataclass")
        if not all(cls._is_generated(vars(owner)[name]) for name in ("__init__", "__eq__")):
            raise EditRefused(f"the constructor or comparison of {qualname} has been replaced")
        if [field.name for field in dataclasses.fields(owner)] != field_names(definition):
            raise EditRefused(f"the running {qualname} has not the fields of its source")
        return cls(qualname, owner)

    @staticmethod
    def _is_generated(method: object) -> bool:
        """Whether dataclass() has made a method: from text of its own, not from a file."""
        code = getattr(method, "__code__", None)
        return isinstance(code, CodeType) and code.co_filename == "<string>"

    def new_content(
        self, edits: Sequence[EditFunction | AddField], edited_file: CodeType
    ) -> list[AddField]:
        """The fields to add, in order."""
        return [
            edit for edit in edits if isinstance(edit, AddField) and edit.qualname == self.qualname
        ]

    def install(self, added: list[AddField] | None) -> None:
        """Give the class these fields beyond its own, or none (None).

        Methods that somebody else has put there since are left alone, and so is all the rest.
        """
        if self._left != self._generated():
            self.edited = False
            return
        self._restore()
        if not added:
            return
        made = self._with_fields(added)
        self._undo = {name: vars(self.owner).get(name, _MISSING) for name in made}
        # Asked of the class: from Python 3.14 they are not among its entries.
        self._undo["__annotations__"] = self.owner.__annotations__
        try:
            # One by one: other threads may be making instances at this moment.
            for name, value in made.items():
                setattr(self.owner, name, value)
        except BaseException:
            self._restore()
            raise
        self.edited = True
        self._left = self._generated()

    def _with_fields(self, added: list[AddField]) -> dict[str, object]:
        """The entries that the class has with more fields: those of a copy made by dataclass()."""
        owner: Any = self.owner
        left_out = {*self._GENERATED, *self._RECORDS, *self._OF_THE_CLASS}
        body = {name: value for name, value in vars(owner).items() if name not in left_out}
        if not (owner.__doc__ or "").startswith(f"{owner.__name__}("):
            body["__doc__"] = owner.__doc__  # else generated as well: the signature
        # dataclass() takes a field's options from the class attribute, where its first run left
        # no more than the default.
        fields = vars(owner)["__dataclass_fields__"]
        body |= {name: copy.copy(field) for name, field in fields.items()}
        body |= {edit.name: edit.default for edit in added}
        new_annotations = {edit.name: edit.type for edit in added}
        body["__annotations__"] = {**owner.__annotations__, **new_annotations}
        body["__qualname__"] = owner.__qualname__
        entries = vars(dataclasses.dataclass(type(owner.__name__, (), body)))
        names = [*fields, *new_annotations, *self._RECORDS, *self._GENERATED]
        made = {name: entries[name] for name in names if name in entries}
        return {**made, "__annotations__": body["__annotations__"]}

    def _generated(self) -> dict[str, object]:
        return {name: vars(self.owner).get(name) for name in self._GENERATED}

    def _restore(self) -> None:
        for name, value in self._undo.items():
            if value is not _MISSING:
                setattr(self.owner, name, value)
            elif name in vars(self.owner):
                delattr(self.owner, name)
        self._undo = {}
        self.edited = False
        self._left = self._generated()

    def is_current(self, module: ModuleType) -> bool:
        """Whether the module's name still leads to this class and the methods left there."""
        try:
            live = _member(module, self.qualname)
        except EditRefused:
            return False
        return live is self.owner and self._left == self._generated()


_MISSING = object()


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
        self._targets: dict[str, _LiveFunction | _LiveDataclass] = {}
        self._active: dict[str, list[str]] = {}
        self._content: dict[str, Any] = {}

    @property
    def active(self) -> tuple[str, ...]:
        """The ids of the fixes whose edits are in the live module."""
        return tuple(self._active)

    def set_active(self, edits: Mapping[str, Sequence[Edit]]) -> None:
        """Make the live module that of the stock source with exactly these edits.

        Args:
            edits: fix id to its edits of this module, in the order in which to make them.

        Raises:
            EditRefused: nothing has changed.
        """
        active, content = self._edited(edits) if edits else ({}, {})
        before, self._content = self._content, content
        try:
            self._install()
        except BaseException:
            self._content = before
            self._install()
            raise
        self._active = active

    def _install(self) -> None:
        # What is put back goes in the reverse order: a caller must not pass what is not taken.
        for qualname in reversed(self._targets):
            if qualname not in self._content:
                self._targets[qualname].install(None)
        for qualname, content in self._content.items():
            self._targets[qualname].install(content)

    def _edited(
        self, edits: Mapping[str, Sequence[Edit]]
    ) -> tuple[dict[str, list[str]], dict[str, Any]]:
        """The names that each fix edits, and the new content of each name."""
        # Parsed anew each time: a tree is of use once, and larger than its source by far.
        tree = ast.parse(self._source, self.filename)
        compile_stock = cache(lambda: _compile(tree, self.filename))
        targets: dict[str, _LiveFunction | _LiveDataclass] = {}
        active: dict[str, list[str]] = {}
        made: list[EditFunction | AddField] = []
        for fix_id, fix_edits in edits.items():
            for edit in resolve(fix_edits, tree):
                if edit.qualname not in targets:
                    targets[edit.qualname] = self._target(edit, tree, compile_stock)
                active.setdefault(fix_id, []).append(edit.qualname)
                made.append(edit)
        for edit in made:
            edit.apply(tree)
        edited_file = _compile(ast.fix_missing_locations(tree), self.filename)
        content = {
            qualname: target.new_content(made, edited_file) for qualname, target in targets.items()
        }
        self._targets.update(targets)
        return active, content

    def _target(
        self, edit: EditFunction | AddField, tree: ast.Module, compile_stock: Callable[[], CodeType]
    ) -> _LiveFunction | _LiveDataclass:
        known = self._targets.get(edit.qualname)
        if known is not None and known.is_current(self.module):
            return known
        # Not seen before, or replaced since, by a reload for one.
        if isinstance(edit, AddField):
            return _LiveDataclass.check(self.module, edit.qualname, tree)
        return _LiveFunction.check(self.module, edit.qualname, tree, compile_stock())

    def is_live(self, fix_id: str) -> bool:
        """Whether the module still is as the edits of a fix have made it."""
        return fix_id in self._active and all(
            self._targets[name].edited and self._targets[name].is_current(self.module)
            for name in self._active[fix_id]
        )

    def foreign_wrappers(self, fix_id: str) -> list[str]:
        """What was around the functions of a fix, beyond their own decorators, when edited."""
        return [
            f"{name} edited beneath {wrapper}"
            for name in self._active.get(fix_id, ())
            for wrapper in self._targets[name].foreign_wrappers
        ]


def raise_when_called(module: ModuleType, qualname: str, error: Exception) -> Callable[[], None]:
    """Put a function in the place of ``qualname`` that raises ``error`` on every call.

    For a refusal that must stop the process but is found inside an import, which a plugin
    must never break.

    Returns:
        What puts back what was there.
    """

    def refuse(*args: object, **kwargs: object) -> None:
        """What is called instead."""
        raise error

    *path, name = qualname.split(".")
    owner: Any = module
    try:
        for part in path:
            owner = getattr(owner, part)
        stock = vars(owner)[name]
    except (AttributeError, KeyError):
        return lambda: None  # nothing that could be called
    refuse.__qualname__ = qualname
    setattr(owner, name, refuse)

    def restore() -> None:
        """Put back what was there, unless somebody else has put something there since."""
        if vars(owner).get(name) is refuse:
            setattr(owner, name, stock)

    return restore
