"""Random small changes of a function's text, each reproducible from its seed.

A mutant is what a fork, a nightly or a later release could hold in the place of the stock
function. Changes are made in lines (see :mod:`tests.releases.text`); the syntax tree only says
where a statement or an expression begins and ends.
"""

from __future__ import annotations

import ast
import random
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from .text import FunctionText, Line

Lines = list[Line]


class View:
    """The tree of a function's present text, and its places in the lines."""

    def __init__(
        self,
        function: FunctionText,
        lines: Lines,
        focus: frozenset[int],
        taken: Sequence[str] = (),
    ):
        """
        Args:
            function: for the header.
            lines: the present text.
            focus: stock lines that a patch touches; most changes are made there.
            taken: names that a patch brings along, which a mutant may use, too.

        Raises:
            SyntaxError: it is not valid Python.
        """
        self.lines = lines
        self.focus = focus
        self.taken = taken
        self._offset = len(function.header) + 1
        node: ast.AST = ast.parse(function.file_text(lines))
        for name in function.qualname.split("."):
            (node,) = (
                child
                for child in ast.iter_child_nodes(node)
                if isinstance(child, (ast.ClassDef, ast.FunctionDef)) and child.name == name
            )
        assert isinstance(node, ast.FunctionDef)
        self.function = node

    def line(self, number: int) -> int:
        """The index of a line that a node names."""
        return number - self._offset

    def range(self, statement: ast.stmt) -> tuple[int, int]:
        """First line of a statement, and the one behind it."""
        assert statement.end_lineno is not None
        return self.line(statement.lineno), self.line(statement.end_lineno) + 1

    def pick(self, rng: random.Random, nodes: Sequence[ast.AST]) -> ast.AST:
        """One of these nodes, most of the time one in focus."""
        if rng.random() < 0.75:
            nodes = [
                node
                for node in nodes
                if self.focus & self.lines[self.line(getattr(node, "lineno", 0))].stock
            ] or nodes
        return rng.choice(nodes)

    def nodes(self, *kinds: type[ast.AST]) -> list[ast.AST]:
        """The function's nodes of these kinds; none inside f-strings, which lie about places."""
        found = []
        pending: list[ast.AST] = [self.function]
        while pending:
            node = pending.pop()
            if isinstance(node, kinds):
                found.append(node)
            if not isinstance(node, ast.JoinedStr):
                pending.extend(ast.iter_child_nodes(node))
        return found

    def blocks(self) -> Iterator[list[ast.stmt]]:
        for node in ast.walk(self.function):
            for _, value in ast.iter_fields(node):
                if isinstance(value, list) and value and isinstance(value[0], ast.stmt):
                    yield value

    def place(self, rng: random.Random) -> tuple[list[ast.stmt], int]:
        """A block and the index of a statement in it."""
        statements = {
            id(statement): (block, index)
            for block in self.blocks()
            for index, statement in enumerate(block)
        }
        chosen = self.pick(rng, [block[index] for block, index in statements.values()])
        return statements[id(chosen)]

    def names(self) -> list[str]:
        """The function's parameters and variables."""
        stored = {n.id for n in self.nodes(ast.Name) if isinstance(n.ctx, ast.Store)}  # type: ignore[attr-defined]
        arguments = {argument.arg for argument in self.nodes(ast.arg)}  # type: ignore[attr-defined]
        return sorted(stored | arguments)

    def write(self, node: ast.AST, text: str) -> Lines:
        """The lines with other text in the place of an expression."""
        first, last = self.line(node.lineno), self.line(node.end_lineno)  # type: ignore[attr-defined]
        before = self.lines[first].text[: node.col_offset]  # type: ignore[attr-defined]
        after = self.lines[last].text[node.end_col_offset :]  # type: ignore[attr-defined]
        old = self.lines[first : last + 1]
        stock = frozenset().union(*(line.stock for line in old if not line.copied))
        # Of a line and its copy, that which stays as it was is the stock line.
        copies = [line for line in self.lines if line.copied and line.stock & stock]
        new = Line(before + text + after, frozenset() if copies else stock)
        changed = [*self.lines[:first], new, *self.lines[last + 1 :]]
        return [replace(line, copied=False) if line in copies else line for line in changed]


def _new(text: str, indent: int) -> Lines:
    return [Line(line).moved_by(indent) for line in textwrap.dedent(text).splitlines()]


# --- statements -------------------------------------------------------------------------------


def delete(view: View, rng: random.Random) -> Lines:
    block, index = view.place(rng)
    start, stop = view.range(block[index])
    left = _new("pass", view.lines[start].indent) if len(block) == 1 else []
    return [*view.lines[:start], *left, *view.lines[stop:]]


def duplicate(view: View, rng: random.Random) -> Lines:
    block, index = view.place(rng)
    start, stop = view.range(block[index])
    copy = [Line(line.text, line.stock, copied=True) for line in view.lines[start:stop]]
    return [*view.lines[:stop], *copy, *view.lines[stop:]]


def copy_elsewhere(view: View, rng: random.Random) -> Lines:
    block, index = view.place(rng)
    start, stop = view.range(block[index])
    block, index = view.place(rng)
    at, _ = view.range(block[index])
    columns = view.lines[at].indent - view.lines[start].indent
    copy = [
        Line(line.text, line.stock, copied=True).moved_by(columns)
        for line in view.lines[start:stop]
    ]
    return [*view.lines[:at], *copy, *view.lines[at:]]


def move_elsewhere(view: View, rng: random.Random) -> Lines:
    block, index = view.place(rng)
    start, stop = view.range(block[index])
    other_block, other = view.place(rng)
    at, _ = view.range(other_block[other])
    if len(block) == 1 or start <= at < stop:
        return view.lines
    columns = view.lines[at].indent - view.lines[start].indent
    moved = [line.moved_by(columns) for line in view.lines[start:stop]]
    if at < start:
        return [*view.lines[:at], *moved, *view.lines[at:start], *view.lines[stop:]]
    return [*view.lines[:start], *view.lines[stop:at], *moved, *view.lines[at:]]


def swap(view: View, rng: random.Random) -> Lines:
    block, index = view.place(rng)
    if index + 1 == len(block):
        return view.lines
    start, middle = view.range(block[index])
    second, stop = view.range(block[index + 1])
    return [
        *view.lines[:start],
        *view.lines[second:stop],
        *view.lines[middle:second],
        *view.lines[start:middle],
        *view.lines[stop:],
    ]


_WRAPPERS = (
    "if self.enabled:",
    "if True:",
    "with self.scope():",
    "with self.scope() as scope:",
    "for _ in range(2):",
    "while False:",
)


def nest(view: View, rng: random.Random) -> Lines:
    """Put one or more statements into a new block."""
    block, index = view.place(rng)
    last = rng.randrange(index, min(len(block), index + 4))
    start, _ = view.range(block[index])
    _, stop = view.range(block[last])
    indent = view.lines[start].indent
    inside = [line.moved_by(4) for line in view.lines[start:stop]]
    header, footer = rng.choice([*((w, "") for w in _WRAPPERS), ("try:", "finally:\n    pass")])
    # The new lines belong to what they enclose, so that ranges of lines include them.
    end = [Line(line.text, inside[-1].stock) for line in _new(footer, indent)]
    return [*view.lines[:start], *_new(header, indent), *inside, *end, *view.lines[stop:]]


def unnest(view: View, rng: random.Random) -> Lines:
    """Put the body of a block in its place."""
    node = view.pick(rng, view.nodes(ast.If, ast.With, ast.For))
    start, stop = view.range(node)  # type: ignore[arg-type]
    body_start, _ = view.range(node.body[0])  # type: ignore[attr-defined]
    _, body_stop = view.range(node.body[-1])  # type: ignore[attr-defined]
    body = [line.moved_by(-4) for line in view.lines[body_start:body_stop]]
    return [*view.lines[:start], *body, *view.lines[stop:]]


_STATEMENTS = (
    "pass",
    "assert True",
    "self.steps = 0",
    "self.steps += 1",
    "self.update({name})",
    "print(f'{{{name}}}')",
    "value = {name}",
    "value = [item for item in {name}]",
    "value = lambda: {name}",
    "if {name}:\n    return None",
    # Everything that gives a name a value:
    "{name} = {name}",
    "{name} = None",
    "{name}: int = 1",
    "{name} += 1",
    "{name}, value = 1, 2",
    "del {name}",
    "({name} := 1)",
    "for {name} in (): pass",
    "value = [{name} for {name} in ()]",
    "value = lambda {name}: {name}",
    "with self.scope() as {name}: pass",
    "try:\n    pass\nexcept ValueError as {name}:\n    pass",
    "import math as {name}",
    "def {name}():\n    pass",
    "class {name}:\n    pass",
    "match value:\n    case {name}:\n        pass",
)


def insert(view: View, rng: random.Random) -> Lines:
    block, index = view.place(rng)
    start, stop = view.range(block[index])
    # Twice as likely: names in focus, and statements that use one.
    names = view.names()
    focused = [
        node.id  # type: ignore[attr-defined]
        for node in view.nodes(ast.Name)
        if view.focus & view.lines[view.line(node.lineno)].stock  # type: ignore[attr-defined]
        and node.id in names  # type: ignore[attr-defined]
    ]
    name = rng.choice([*names, *focused, *view.taken])
    new = _new(rng.choice(_STATEMENTS).format(name=name), view.lines[start].indent)
    at = rng.choice((start, stop))
    return [*view.lines[:at], *new, *view.lines[at:]]


def add_else(view: View, rng: random.Random) -> Lines:
    node = view.pick(rng, view.nodes(ast.If, ast.For))
    if node.orelse:  # type: ignore[attr-defined]
        return view.lines
    start, stop = view.range(node)  # type: ignore[arg-type]
    new = [
        Line(line.text, view.lines[stop - 1].stock)
        for line in _new("else:\n    self.steps = 0", view.lines[start].indent)
    ]
    return [*view.lines[:stop], *new, *view.lines[stop:]]


def drop_else(view: View, rng: random.Random) -> Lines:
    node = view.pick(rng, view.nodes(ast.If))
    _, body_stop = view.range(node.body[-1])  # type: ignore[attr-defined]
    _, stop = view.range(node)  # type: ignore[arg-type]
    return [*view.lines[:body_stop], *view.lines[stop:]]


# --- expressions ------------------------------------------------------------------------------


def _rewrite(
    *kinds: type[ast.AST],
) -> Callable[[Callable[[ast.AST, random.Random], str | None]], Mutator]:
    """Make a mutator of a function that gives the new text of a node, or None."""

    def decorate(change: Callable[[ast.AST, random.Random], str | None]) -> Mutator:
        def mutator(view: View, rng: random.Random) -> Lines:
            nodes = view.nodes(*kinds)
            node = view.pick(rng, nodes)
            text = change(node, rng)
            return view.lines if text is None else view.write(node, text)

        mutator.__name__ = change.__name__
        return mutator

    return decorate


Mutator = Callable[[View, random.Random], Lines]


@_rewrite(ast.Name)
def rename_once(node: ast.AST, rng: random.Random) -> str:
    return node.id + "_"  # type: ignore[attr-defined,no-any-return]


@_rewrite(ast.Attribute)
def rename_attribute(node: ast.AST, rng: random.Random) -> str:
    return ast.unparse(node) + "_"


@_rewrite(ast.Constant)
def constant(node: ast.AST, rng: random.Random) -> str | None:
    value = node.value  # type: ignore[attr-defined]
    if isinstance(value, str) and "\n" in value:
        return None
    other = {bool: not value, int: 7, str: "other"}.get(type(value), 0)
    return repr(rng.choice((other, None)))


_OPERATORS: dict[type[ast.AST], tuple[ast.AST, ...]] = {
    ast.Compare: (ast.Eq(), ast.NotEq(), ast.Lt(), ast.GtE(), ast.Is(), ast.IsNot(), ast.In()),
    ast.BinOp: (ast.Add(), ast.Sub(), ast.Mult(), ast.FloorDiv(), ast.BitOr()),
    ast.BoolOp: (ast.And(), ast.Or()),
}


@_rewrite(*_OPERATORS)
def operator(node: ast.AST, rng: random.Random) -> str:
    new = rng.choice(_OPERATORS[type(node)])
    if isinstance(node, ast.Compare):
        node.ops[0] = new  # type: ignore[call-overload]
    else:
        node.op = new  # type: ignore[attr-defined]
    return f"({ast.unparse(node)})"


@_rewrite(ast.Compare, ast.BoolOp, ast.IfExp, ast.UnaryOp)
def negate(node: ast.AST, rng: random.Random) -> str:
    return f"(not {ast.unparse(node)})"


@_rewrite(ast.IfExp)
def exchange_branches(node: ast.AST, rng: random.Random) -> str:
    body, orelse = node.body, node.orelse  # type: ignore[attr-defined]
    return f"({ast.unparse(orelse)} if {ast.unparse(node.test)} else {ast.unparse(body)})"  # type: ignore[attr-defined]


@_rewrite(ast.Call)
def call(node: ast.AST, rng: random.Random) -> str | None:
    assert isinstance(node, ast.Call)
    ways: list[Callable[[], object]] = [
        lambda: node.keywords.append(ast.keyword("added", ast.Constant(1))),
        lambda: node.args.append(ast.Constant(1)),
    ]
    if node.keywords:
        ways.append(lambda: node.keywords.pop(rng.randrange(len(node.keywords))))
        ways.append(lambda: setattr(rng.choice(node.keywords), "arg", "renamed"))
        ways.append(lambda: setattr(rng.choice(node.keywords), "value", ast.Constant(None)))
        ways.append(lambda: rng.shuffle(node.keywords))
    if node.args:
        ways.append(lambda: node.args.pop(rng.randrange(len(node.args))))
    rng.choice(ways)()
    return ast.unparse(node)


@_rewrite(ast.Call, ast.Compare, ast.Attribute, ast.BinOp, ast.Subscript)
def same_but_for_spelling(node: ast.AST, rng: random.Random) -> str | None:
    read = isinstance(getattr(node, "ctx", ast.Load()), ast.Load)
    return f"({ast.unparse(node)})" if read else None


@_rewrite(ast.Slice)
def bounds(node: ast.AST, rng: random.Random) -> str:
    lower, upper = node.lower, node.upper  # type: ignore[attr-defined]
    low, high = (ast.unparse(part) if part else "" for part in (lower, upper))
    return rng.choice((f"{low or 0}:{high}", f"{low}:{high}:1", f"{high}:{low}", f"{low}:1"))


# --- the whole function -----------------------------------------------------------------------


def rename_everywhere(view: View, rng: random.Random) -> Lines:
    """Another name for a parameter or variable, wherever it is read or set."""
    name = rng.choice(view.names())
    places = [
        (node.lineno, node.col_offset)  # type: ignore[attr-defined]
        for node in view.nodes(ast.Name, ast.arg)
        if name in (getattr(node, "id", None), getattr(node, "arg", None))
    ]
    lines = list(view.lines)
    for number, column in sorted(places, reverse=True):
        line = lines[view.line(number)]
        text = line.text[:column] + name + "_new" + line.text[column + len(name) :]
        lines[view.line(number)] = Line(text, line.stock)
    return lines


def annotation(view: View, rng: random.Random) -> Lines:
    """Change or drop the annotation of a variable, or change that of a parameter."""
    annotated = [n for n in view.nodes(ast.AnnAssign, ast.arg) if n.annotation]  # type: ignore[attr-defined]
    node = view.pick(rng, annotated)
    if isinstance(node, ast.AnnAssign) and node.value and rng.random() < 0.5:
        return view.write(node, f"{ast.unparse(node.target)} = {ast.unparse(node.value)}")
    return view.write(node.annotation, rng.choice(("object", "'Later'", "int | None")))  # type: ignore[attr-defined]


def parameter(view: View, rng: random.Random) -> Lines:
    argument = rng.choice(view.function.args.args[1:] or view.function.args.args)
    text = ast.unparse(argument)
    return view.write(argument, rng.choice((f"added: int, {text}", f"*, {text}")))


def signature(view: View, rng: random.Random) -> Lines:
    """Rename the function, drop or add a decorator, or make it a coroutine."""
    at = view.line(view.function.lineno)
    line = view.lines[at]
    change = rng.randrange(4)
    if change == 0:
        new = [Line(line.text.replace("def ", "def other_", 1), line.stock)]
    elif change == 1:
        new = [Line(line.text.replace("def ", "async def ", 1), line.stock)]
    elif change == 2:
        new = [*_new("@staticmethod", line.indent), line]
    else:
        return view.lines[at:]
    return [*view.lines[:at], *new, *view.lines[at + 1 :]]


def whitespace(view: View, rng: random.Random) -> Lines:
    """A comment or an empty line anywhere."""
    at = rng.randrange(1, len(view.lines))
    return [*view.lines[:at], Line(rng.choice(("", "        # a comment"))), *view.lines[at:]]


MUTATORS: tuple[tuple[Mutator, int], ...] = (
    *((mutator, 3) for mutator in (delete, duplicate, swap, nest, move_elsewhere)),
    *((mutator, 2) for mutator in (unnest, copy_elsewhere, add_else, rename_once, constant)),
    *((mutator, 2) for mutator in (operator, call, annotation, rename_everywhere, bounds)),
    *((mutator, 1) for mutator in (drop_else, negate, exchange_branches, rename_attribute)),
    *((mutator, 1) for mutator in (same_but_for_spelling, parameter, signature, whitespace)),
    (insert, 8),
)
"""Each kind of change with its weight."""


def mutant(
    function: FunctionText, focus: frozenset[int], seed: str, taken: Sequence[str] = ()
) -> tuple[str, Lines]:
    """The mutant of a seed: what was changed, and its lines. One in four has two changes."""
    rng = random.Random(seed)
    kinds, weights = zip(*MUTATORS, strict=True)
    while True:
        lines = list(function.lines)
        chosen = rng.choices(kinds, weights, k=2 if rng.random() < 0.25 else 1)
        try:
            for mutator in chosen:
                lines = mutator(View(function, lines, focus, taken), rng)
            compile(function.file_text(lines), "mutant", "exec", dont_inherit=True)
        except (SyntaxError, ValueError, IndexError):
            continue  # not Python, or nothing of that kind is left: draw again
        if [line.text for line in lines] != [line.text for line in function.lines]:
            return "+".join(mutator.__name__ for mutator in chosen), lines
