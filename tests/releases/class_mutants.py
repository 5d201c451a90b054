"""Random small changes of a dataclass's text, and what such a class is like to its users."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import random
import symtable
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

Lines = list[str]

# What a class body reads of its module: anything at all, in annotations and as defaults.
_HEADER = """\
import dataclasses
from dataclasses import KW_ONLY, InitVar, dataclass, field
from typing import Any, ClassVar
class _Anything(type):
    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return cls
class Anything(metaclass=_Anything): pass
class Plain: pass
@dataclass
class Inherited:
    inherited: int = 1
def same(cls): return cls
def derived(cls): return type(cls.__name__, (cls,), {})
"""


def read_class(file: Path, name: str) -> tuple[str, Lines]:
    """A small header that the class can be executed below, and its lines."""
    source = file.read_text("utf-8")
    (node,) = (n for n in ast.parse(source).body if isinstance(n, ast.ClassDef) and n.name == name)
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    table = symtable.symtable(source, str(file), "exec")
    known = {*dir(__builtins__), "dataclass", "field", "Any", name}
    names = {s.get_name() for s in table.get_symbols() if s.is_local()} - known
    header = f"{_HEADER}{' = '.join(sorted(names))} = Anything\n"
    return header, source.splitlines()[first - 1 : node.end_lineno]


def execute(text: str, file: Path, name: str) -> tuple[ModuleType, type]:
    """The module that a text makes, and its class."""
    file.write_text(text, "utf-8")
    module = ModuleType(file.stem)
    exec(compile(text, str(file), "exec", dont_inherit=True), module.__dict__)
    return module, getattr(module, name)


# --- mutants ----------------------------------------------------------------------------------

_BODY = (
    *("added: int = 3", "added: int", "added: list = field(default_factory=list)"),
    *("added: ClassVar[int] = 3", "added: 'ClassVar[int]' = 3", "added: InitVar[int] = 3"),
    *("_: KW_ONLY", "added: int = field(default=3, kw_only=True)"),
    *("added: int = field(default=3, init=False)", "added: int = field(default=3, repr=False)"),
    *("added: int = field(default=3, compare=False)", "added: int = field(default=3, hash=True)"),
    *(
        "added: int = field(default=3, metadata={'a': 1})",
        "added = 3",
        "if True:\n    added: int = 3",
    ),
    *("class Added:\n    added: int = 3", "def added(self): pass", "__slots__ = ()"),
    *("skip_attention: bool = False", "skip_attention: int = 3", "skip_attention = True"),
    *("def __init__(self): pass", "def __eq__(self, other): return True"),
    *(
        "def __repr__(self): return 'own'",
        "def __hash__(self): return 1",
        "__match_args__ = ('own',)",
    ),
    *("def __lt__(self, other): return True", "def __setattr__(self, *_): raise AttributeError"),
    *("__hash__ = None", "__doc__ = 'own'", "def __replace__(self): pass", "pass"),
)
_DECORATORS = (
    *("@dataclass()", "@dataclass(init=False)", "@dataclass(repr=False)", "@dataclass(eq=False)"),
    *("@dataclass(order=True)", "@dataclass(unsafe_hash=True)", "@dataclass(frozen=True)"),
    *(
        "@dataclass(match_args=False)",
        "@dataclass(kw_only=True)",
        "@dataclass(slots=True)",
        "# none",
    ),
    *("@same\n@dataclass", "@dataclass\n@same", "@derived\n@dataclass", "@dataclass\n@derived"),
    *("@dataclass\n@dataclass", "@dataclasses.dataclass"),
)
_BASES = ("(Plain)", "(Inherited)", "(Plain, Inherited)", "(dict)", "()")


def _statements(lines: Lines) -> list[tuple[int, int]]:
    """Where each statement of the body begins and ends."""
    (node,) = ast.parse("\n".join(lines)).body
    assert isinstance(node, ast.ClassDef)
    return [(s.lineno - 1, s.end_lineno or 0) for s in node.body]


def _write(statement: str) -> Lines:
    return [f"    {line}" for line in statement.splitlines()]


def _insert(lines: Lines, rng: random.Random) -> Lines:
    start, stop = rng.choice(_statements(lines))
    at = rng.choice((start, stop))
    return [*lines[:at], *_write(rng.choice(_BODY)), *lines[at:]]


def _append(lines: Lines, rng: random.Random) -> Lines:
    return [*lines, *_write(rng.choice(_BODY))]


def _delete(lines: Lines, rng: random.Random) -> Lines:
    start, stop = rng.choice(_statements(lines))
    return [*lines[:start], *lines[stop:]]


def _copy(lines: Lines, rng: random.Random) -> Lines:
    start, stop = rng.choice(_statements(lines))
    at, _ = rng.choice(_statements(lines))
    return [*lines[:at], *lines[start:stop], *lines[at:]]


def _move(lines: Lines, rng: random.Random) -> Lines:
    start, stop = rng.choice(_statements(lines))
    left = [*lines[:start], *lines[stop:]]
    at, _ = rng.choice(_statements(left))
    return [*left[:at], *lines[start:stop], *left[at:]]


def _reword(lines: Lines, rng: random.Random) -> Lines:
    """Another name, annotation or default of a field; or none of them."""
    start, stop = rng.choice(_statements(lines))
    text = "\n".join(lines[start:stop])
    name, colon, rest = text.strip().partition(": ")
    if not colon or not name.isidentifier():
        return lines
    annotation, _, default = rest.partition(" = ")
    new = rng.choice(
        (
            f"{name}_: {rest}",
            f"{name} = {default or None}",
            f"{name}: '{annotation}' = {default or None}",
            f"{name}: object = {default or None}",
            f"{name}: {annotation} = 7",
            f"{name}: {annotation} = field(default=7)",
            f"{name}: {annotation} = field(default_factory=dict)",
            f"{name}: {annotation}",
        )
    )
    return [*lines[:start], *_write(new), *lines[stop:]]


def _decorate(lines: Lines, rng: random.Random) -> Lines:
    return [*rng.choice(_DECORATORS).splitlines(), *lines[1:]]


def _derive(lines: Lines, rng: random.Random) -> Lines:
    at = next(n for n, line in enumerate(lines) if line.startswith("class "))
    new = f"{lines[at].split('(')[0].rstrip(':')}{rng.choice(_BASES)}:"
    return [*lines[:at], new, *lines[at + 1 :]]


_MUTATORS: tuple[tuple[Callable[[Lines, random.Random], Lines], int], ...] = (
    *((mutator, 3) for mutator in (_insert, _append, _reword, _decorate)),
    *((mutator, 1) for mutator in (_delete, _copy, _move, _derive)),
)


def class_mutant(header: str, lines: Lines, file: Path, name: str, seed: str) -> Lines:
    """The mutant of a seed, which can be executed. One in four has two changes."""
    rng = random.Random(seed)
    mutators, weights = zip(*_MUTATORS, strict=True)
    while True:
        new = lines
        try:
            for mutator in rng.choices(mutators, weights, k=2 if rng.random() < 0.25 else 1):
                new = mutator(new, rng)
            execute(header + "\n".join(new) + "\n", file, name)
        except Exception:
            continue  # not Python, or not a dataclass of Python's
        if new != lines:
            return new


# --- what a class is like ---------------------------------------------------------------------


def _outcome(action: Callable[[], Any]) -> object:
    try:
        return action()
    except Exception as error:
        return type(error).__name__


def _field(field: Any) -> tuple[object, ...]:
    names = ("name", "type", "default", "default_factory", "init", "repr", "hash", "compare")
    more = ("kw_only", "metadata", "_field_type")
    return tuple(map(str, (getattr(field, name) for name in (*names, *more))))


def picture(cls: Any) -> dict[str, object]:
    """What a user of a dataclass can tell of it, comparable between two of the same name."""

    def instance() -> Any:
        required = [
            field.name
            for field in dataclasses.fields(cls)
            if field.init and field.default is field.default_factory is dataclasses.MISSING
        ]
        return cls(**dict.fromkeys(required, 1))

    fields = _outcome(lambda: dataclasses.fields(cls))
    keys = {"__dict__", "__weakref__", "__firstlineno__"}
    return {
        "entries": sorted({*vars(cls)} - keys),
        "own": sorted((k, v) for k, v in vars(cls).items() if isinstance(v, int | str | tuple)),
        "all fields": [*map(_field, vars(cls).get("__dataclass_fields__", {}).values())],
        "fields": [f.name for f in fields] if isinstance(fields, tuple) else fields,
        "parameters": repr(vars(cls).get("__dataclass_params__")),
        "signature": _outcome(lambda: str(inspect.signature(cls))),
        "annotations": str(cls.__annotations__),
        "hash": _outcome(lambda: cls.__hash__ is None),
        "repr": _outcome(lambda: repr(instance())),
        "equal": _outcome(lambda: instance() == instance()),
        "different": [
            _outcome(lambda name=name: _changed(instance(), name) == instance())  # type: ignore[misc]
            for name in (f.name for f in (fields if isinstance(fields, tuple) else ()))
        ],
        "less": _outcome(lambda: instance() < instance()),
        "hash value": _outcome(
            lambda: _changed(instance(), "skip_attention").__hash__() != instance().__hash__()
        ),
        "dict": _outcome(lambda: str(dataclasses.asdict(instance()))),
        "replace": _outcome(lambda: repr(dataclasses.replace(instance(), skip_attention=1))),
    }


def _changed(made: Any, name: str) -> Any:
    object.__setattr__(made, name, "changed")
    return made
