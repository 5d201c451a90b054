"""The text of one function of a release, in lines that remember where they came from.

Mutants and patches both work on this text and never on a syntax tree, so that a patch is an
independent witness of what an edit of the tree should have done. Stock lines are counted from the
function's ``def``, which is line 1.
"""

from __future__ import annotations

import ast
import re
import symtable
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True)
class Line:
    """One line of text.

    Attributes:
        text: the line.
        stock: the numbers of the stock lines that it was made of; none for a new line.
        copied: it repeats lines that are still there.
    """

    text: str
    stock: frozenset[int] = frozenset()
    copied: bool = False

    @property
    def indent(self) -> int:
        return len(self.text) - len(self.text.lstrip(" "))

    @property
    def blank(self) -> bool:
        return not self.text.strip() or self.text.lstrip().startswith("#")

    def moved_by(self, columns: int) -> Line:
        """The line with another indentation."""
        if not self.text.strip():
            return self
        return replace(self, text=" " * (self.indent + columns) + self.text.lstrip(" "))


@dataclass(frozen=True)
class FunctionText:
    """A function in the smallest file that holds it under the same qualified name.

    Attributes:
        qualname: such as ``"Class.method"``.
        names: all names of the stock module.
        header: future imports, a value for each of the names, and one ``class`` line for each
            enclosing class.
        lines: the function, decorators included.
    """

    qualname: str
    names: frozenset[str]
    header: tuple[str, ...]
    lines: tuple[Line, ...]

    @classmethod
    def read(cls, file: Path, qualname: str) -> FunctionText:
        """Cut a function out of a source file."""
        source = file.read_text("utf-8")
        tree = ast.parse(source)
        header = [
            f"from __future__ import {', '.join(alias.name for alias in node.names)}"
            for node in tree.body
            if isinstance(node, ast.ImportFrom) and node.module == "__future__"
        ]
        *classes, name = qualname.split(".")
        names = {
            symbol.get_name()
            for symbol in symtable.symtable(source, str(file), "exec").get_symbols()
            if symbol.is_local()
        }
        header.append(" = ".join([*sorted(names - {qualname.split(".")[0]}), "None"]))
        body: list[ast.stmt] = tree.body
        for class_name in classes:
            (owner,) = (n for n in body if isinstance(n, ast.ClassDef) and n.name == class_name)
            header.append(f"{' ' * owner.col_offset}class {class_name}:")
            body = owner.body
        (function,) = (n for n in body if isinstance(n, ast.FunctionDef) and n.name == name)
        first = min([function.lineno, *(node.lineno for node in function.decorator_list)])
        assert function.end_lineno is not None
        texts = source.splitlines()[first - 1 : function.end_lineno]
        lines = tuple(
            Line(text, frozenset([number]))
            for number, text in enumerate(texts, first - function.lineno + 1)
        )
        # Nothing begins or ends in a comment.
        assert all(line.blank or line.text.isascii() for line in lines), (
            "columns are counted in characters"
        )
        return cls(qualname, frozenset(names), tuple(header), lines)

    def file_text(self, lines: Sequence[Line]) -> str:
        """The text of the small file with these lines as the function."""
        return "\n".join([*self.header, *(line.text for line in lines)]) + "\n"


class Inapplicable(Exception):
    """A patch cannot follow a mutant."""


class Operation(Protocol):
    """One change of a function's text."""

    def anchors(self) -> tuple[int, ...]:
        """The stock lines that must be there once, in the stock order."""

    def apply(self, lines: list[Line]) -> list[Line]:
        """The changed text.

        Raises:
            Inapplicable: a place is gone, is there twice or is nested differently.
        """


def patch(lines: Sequence[Line], operations: Sequence[Operation]) -> list[Line]:
    """Make the changes of a patch, one after the other, in stock or mutated text.

    Raises:
        Inapplicable: they cannot be made.
    """
    anchors = sorted({number for operation in operations for number in operation.anchors()})
    places = [_position(lines, number) for number in anchors]
    if places != sorted(set(places)):
        raise Inapplicable("lines of the patch are no longer in their order")
    changed = list(lines)
    for operation in operations:
        changed = operation.apply(changed)
    return changed


def _position(lines: Sequence[Line], number: int) -> int:
    found = [index for index, line in enumerate(lines) if number in line.stock]
    if not found or any(lines[index].copied for index in found):
        raise Inapplicable(f"line {number} is gone or there more than once")
    return found[0]


def _extent(
    lines: Sequence[Line], first: int, last: int, *, whole_block: bool = False
) -> tuple[int, int]:
    """From the line ``first`` to behind ``last``, with what mutations have put there.

    Lines of the range that are elsewhere now are not followed. New lines belong to it where they
    are indented more deeply than the first, or, for a whole block, as deeply.
    """
    start = _position(lines, first)
    numbers = frozenset(range(first, last + 1))
    least = lines[start].indent + (0 if whole_block else 1)
    stop = start + 1
    while stop < len(lines):
        line = lines[stop]
        # A line at less indentation, such as `finally:`, ends a block that mutations have made.
        same = bool(numbers & line.stock) and not line.copied
        if not (
            line.blank or line.indent >= least or (same and line.indent == lines[start].indent)
        ):
            break
        stop += 1
    while lines[stop - 1].blank:
        stop -= 1
    return start, stop


def _headers(lines: Sequence[Line], index: int) -> list[int]:
    """The lines that open the blocks around a line, innermost first."""
    found = []
    indent = lines[index].indent
    for above in range(index - 1, -1, -1):
        closes = lines[above].text.lstrip().startswith((")", "]", "}"))
        if not lines[above].blank and lines[above].indent < indent and not closes:
            indent = lines[above].indent
            found.append(above)
    return found


# A space before `=` tells a statement from the keyword of a call that has a line to itself.
_SETS = (
    r"^\s*[\w, ]*\b{name}\b[\w, ]*(:[^=()\n]*)? ([-+*/%&|^@]|//|\*\*|<<|>>)?=(?!=)"
    r"|\bfor [\w, ]*\b{name}\b[\w, ]* in\b|\b(as|def|import|case|del) {name}\b|\b{name} :="
)


@dataclass(frozen=True)
class MoveLines:
    """Move lines before another, at its indentation, out of ``with`` blocks and into none.

    ``reads`` are names that must have the same value there as where the lines were.
    """

    first: int
    last: int
    before: int
    reads: tuple[str, ...] = ()

    def anchors(self) -> tuple[int, ...]:
        return (self.before, self.first)

    def apply(self, lines: list[Line]) -> list[Line]:
        start, stop = _extent(lines, self.first, self.last)
        at = _position(lines, self.before)
        around = _headers(lines, at)
        left = [header for header in _headers(lines, start) if header not in around]
        if not set(around) <= set(_headers(lines, start)):
            raise Inapplicable(f"line {self.before} is in a block of its own")
        if not all(lines[header].text.lstrip().startswith("with ") for header in left):
            raise Inapplicable(f"line {self.first} is in a block that is no `with`")
        passed = "\n".join(line.text for line in lines[at:start] if not line.blank)
        for name in self.reads:
            if re.search(_SETS.format(name=name), passed, re.MULTILINE):
                raise Inapplicable(
                    f"{name} is set between the lines {self.before} and {self.first}"
                )
        columns = lines[at].indent - lines[start].indent
        moved = [line.moved_by(columns) for line in lines[start:stop]]
        return [*lines[:at], *moved, *lines[at:start], *lines[stop:]]


@dataclass(frozen=True)
class InsertText:
    """Insert text of our own before or after a line, at its indentation."""

    text: str
    before: int | None = None
    after: int | None = None

    def anchors(self) -> tuple[int, ...]:
        return tuple(number for number in (self.before, self.after) if number is not None)

    def apply(self, lines: list[Line]) -> list[Line]:
        (number,) = self.anchors()
        at = _position(lines, number)
        new = [Line(text).moved_by(lines[at].indent) for text in self.text.splitlines()]
        if self.after is not None:
            _, at = _extent(lines, number, number)
        return [*lines[:at], *new, *lines[at:]]


@dataclass(frozen=True)
class InsertAtTop:
    """Insert a line of our own before the first statement, behind a docstring."""

    text: str

    def anchors(self) -> tuple[int, ...]:
        return (1,)

    def apply(self, lines: list[Line]) -> list[Line]:
        depth = 0
        for at in range(_position(lines, 1), len(lines)):
            code = lines[at].text.split("#")[0].rstrip()
            depth += sum(code.count(b) for b in "([{") - sum(code.count(b) for b in ")]}")
            if depth == 0 and code.endswith(":"):
                break
        at += 1
        while lines[at].blank:
            at += 1
        indent = lines[at].indent
        text = lines[at].text.strip()
        if text.startswith('"""'):
            text = text[3:]
            while not text.endswith('"""'):
                at += 1
                text = lines[at].text.rstrip()
            at += 1
        return [*lines[:at], Line(self.text).moved_by(indent), *lines[at:]]


@dataclass(frozen=True)
class InsertInLine:
    """Insert text of our own into a line, behind the first ``after`` in it."""

    line: int
    after: str
    text: str

    def anchors(self) -> tuple[int, ...]:
        return (self.line,)

    def apply(self, lines: list[Line]) -> list[Line]:
        at = _position(lines, self.line)
        before, found, behind = lines[at].text.partition(self.after)
        if not found:
            raise Inapplicable(f"line {self.line} has no `{self.after}`")
        new = replace(lines[at], text=before + found + self.text + behind)
        return [*lines[:at], new, *lines[at + 1 :]]


@dataclass(frozen=True)
class ReplaceLine:
    """Write text of our own in the place of a line that is a statement of its own."""

    line: int
    text: str

    def anchors(self) -> tuple[int, ...]:
        return (self.line,)

    def apply(self, lines: list[Line]) -> list[Line]:
        at = _position(lines, self.line)
        new = replace(lines[at], text=" " * lines[at].indent + self.text)
        return [*lines[:at], new, *lines[at + 1 :]]


@dataclass(frozen=True)
class IfThere:
    """Another operation, but only where a line has not been deleted."""

    line: int
    operation: Operation

    def anchors(self) -> tuple[int, ...]:
        return self.operation.anchors()

    def apply(self, lines: list[Line]) -> list[Line]:
        there = any(self.line in line.stock for line in lines)
        return self.operation.apply(lines) if there else lines


@dataclass(frozen=True)
class ExtendCall:
    """Pass one more argument in the call of a function, which is somewhere in the lines."""

    first: int
    last: int
    function: str
    argument: str

    def anchors(self) -> tuple[int, ...]:
        return (self.first,)

    def apply(self, lines: list[Line]) -> list[Line]:
        start, stop = _extent(lines, self.first, self.last)
        text = "\n".join(line.text for line in lines[start:stop])
        call = re.search(rf"\b{self.function}\(", text)
        if call is None:
            raise Inapplicable(f"line {self.first} does not call {self.function}")
        at, depth = call.end(), 1
        while depth:
            depth += (text[at] in "([{") - (text[at] in ")]}")
            at += 1
        at -= 1
        comma = "" if text[:at].rstrip().endswith((",", "(")) else ", "
        changed = f"{text[:at]}{comma}{self.argument}{text[at:]}".splitlines()
        new = [
            replace(line, text=text) for line, text in zip(lines[start:stop], changed, strict=True)
        ]
        return [*lines[:start], *new, *lines[stop:]]


@dataclass(frozen=True)
class ReplaceNames:
    """Write ``replacement`` (with ``{}`` for the name) for names, in lines to the block's end."""

    first: int
    last: int
    names: tuple[str, ...]
    replacement: str

    def anchors(self) -> tuple[int, ...]:
        return (self.first,)

    def apply(self, lines: list[Line]) -> list[Line]:
        start, stop = _extent(lines, self.first, self.last, whole_block=True)
        # Neither an attribute nor the keyword of a call, which are written without spaces.
        names = re.compile(rf"(?<![\w.])({'|'.join(self.names)})\b(?!=[^=])")
        new = self.replacement.format(r"\1")
        return [
            *lines[:start],
            *(replace(line, text=names.sub(new, line.text)) for line in lines[start:stop]),
            *lines[stop:],
        ]


@dataclass(frozen=True)
class WrapLines:
    """Put lines below a header of our own, indented.

    With ``within`` they may be anywhere in the block that this line opens; with ``behind`` they
    must come right behind the statement in these lines, the first and the last.
    """

    first: int
    last: int
    header: str
    within: int | None = None
    behind: tuple[int, int] | None = None

    def anchors(self) -> tuple[int, ...]:
        first = self.first if self.within is None else self.within
        return (first,) if self.behind is None else (self.behind[0], first)

    def apply(self, lines: list[Line]) -> list[Line]:
        start, stop = _extent(lines, self.first, self.last)
        if self.behind is not None:
            _, end = _extent(lines, *self.behind)
            same = lines[_position(lines, self.behind[0])].indent == lines[start].indent
            if not same or not all(line.blank for line in lines[end:start]):
                raise Inapplicable(f"line {self.first} is not right behind {self.behind[1]}")
        loop = self.within
        if loop is not None and _position(lines, loop) not in _headers(lines, start):
            raise Inapplicable(f"line {self.first} is outside of the block it was in")
        wrapped = [line.moved_by(4) for line in lines[start:stop]]
        header = Line(self.header).moved_by(lines[start].indent)
        return [*lines[:start], header, *wrapped, *lines[stop:]]
