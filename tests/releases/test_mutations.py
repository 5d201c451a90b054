"""Structure decides (``VLLM_CGFIX_UNVERIFIED=1``): on random mutants of the edited functions.

Each mutant is either refused whole, or its edited code is that of the same mutant with the change
made in its text by a patch that knows nothing of the edits (``tests/releases/patches``).
"""

from __future__ import annotations

import ast
import builtins
import dis
import hashlib
import importlib
import importlib.machinery
import itertools
import pkgutil
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any

import pytest

from vllm_cgfix import code_edit
from vllm_cgfix.code_edit import (
    Edit,
    EditFunction,
    EditRefused,
    Insert,
    Move,
    OneOf,
    Rename,
    SourceEditor,
    Step,
    Wrap,
    resolve,
)
from vllm_cgfix.fix import module_path
from vllm_cgfix.fixes import by_id

from . import patches
from .mutants import mutant
from .sources import source_dir
from .text import FunctionText, Inapplicable, Line, Operation, patch

# "x is not 7" is what a mutant may say.
pytestmark = pytest.mark.filterwarnings("ignore::SyntaxWarning")

MUTANTS = 600
"""For each edited function of each release."""

IGNORED = {"co_firstlineno", "co_linetable", "co_lnotab", "co_filename"}


@dataclass(frozen=True)
class Target:
    """One function that a fix edits in one release.

    Attributes:
        edits: those of the fix's edits of the module that are for this function.
        operations: the same as a patch.
    """

    fix: str
    release: str
    function: FunctionText = field(repr=False)
    edits: tuple[Edit, ...] = field(repr=False)
    operations: Sequence[Operation] = field(repr=False)

    @property
    def focus(self) -> frozenset[int]:
        """Every stock line that is around a place of the patch."""
        lines: set[int] = set()
        for operation in self.operations:
            for number in operation.anchors():
                lines.update(range(number - 2, number + 3))
        return frozenset(lines)

    def __str__(self) -> str:
        return f"{self.fix} {self.release} {self.function.qualname}"


def patched_functions() -> list[tuple[str, str, str]]:
    """Fix, release and qualified name of everything in the patch files."""
    found = []
    for name in sorted(module.name for module in pkgutil.iter_modules(patches.__path__)):
        patch_file = importlib.import_module(f"{patches.__name__}.{name}")
        for release, functions in patch_file.PATCHES.items():
            found += [(name.replace("_", "-"), release, qualname) for qualname in functions]
    return found


each_function = pytest.mark.parametrize("names", patched_functions(), ids="-".join)


def target(fix_id: str, release: str, qualname: str) -> Target:
    fix = by_id(fix_id)
    ((module, edits),) = (
        (module, found) for module, edits in fix.edits.items() if (found := _for(qualname, edits))
    )
    patch_file = importlib.import_module(f"{patches.__name__}.{fix_id.replace('-', '_')}")
    return Target(
        fix_id,
        release,
        FunctionText.read(source_dir(release) / module_path(module), qualname),
        edits,
        patch_file.PATCHES[release][qualname],
    )


def _for(qualname: str, edits: Iterable[Edit]) -> tuple[Edit, ...]:
    found: list[Edit] = []
    for edit in edits:
        if isinstance(edit, OneOf):
            choices = (
                tuple(part for part in parts if part.qualname == qualname)
                for parts in edit.alternatives
            )
            found += [OneOf(left)] if (left := tuple(filter(None, choices))) else []
        elif isinstance(edit, EditFunction) and edit.qualname == qualname:
            found.append(edit)
    return tuple(found)


# --- code objects -----------------------------------------------------------------------------


def find_code(code: CodeType, qualname: str) -> CodeType:
    for name in qualname.split("."):
        (code,) = (c for c in code.co_consts if isinstance(c, CodeType) and c.co_name == name)
    return code


def comparable(value: object) -> object:
    """A code object or constant, less the tables of lines and columns."""
    if isinstance(value, CodeType):
        names = [n for n in dir(value) if n.startswith("co_") and n not in IGNORED]
        return {
            name: comparable(attribute)
            for name in names
            if not callable(attribute := getattr(value, name))
        }
    if isinstance(value, tuple):
        return [comparable(item) for item in value]
    return type(value), repr(value) if isinstance(value, float) else value


def read_globals(code: CodeType) -> set[str]:
    nested = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    own = {i.argval for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    return own.union(*map(read_globals, nested))


# --- the check --------------------------------------------------------------------------------


def live_module(name: str, file: Path, qualname: str, code: CodeType) -> ModuleType:
    """A module as an import of the file would leave it, as far as the function goes."""
    module = ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None, origin=str(file))
    member: Any = FunctionType(
        code, module.__dict__, closure=tuple(CellType() for _ in code.co_freevars)
    )
    *classes, function = qualname.split(".")
    for class_name in reversed(classes):
        member, function = type(class_name, (), {function: member}), class_name
    setattr(module, function, member)
    return module


def live_function(module: ModuleType, qualname: str) -> FunctionType:
    member: Any = module
    for name in qualname.split("."):
        member = vars(member)[name]
    assert isinstance(member, FunctionType)
    return member


def judge(case: Target, lines: Sequence[Line], folder: Path) -> str:
    """What became of a mutant: "refused", "equal", or what is wrong."""
    qualname = case.function.qualname
    file = folder / "mutant.py"
    source = case.function.file_text(lines).encode()
    file.write_bytes(source)
    stock = compile(source, str(file), "exec", dont_inherit=True)
    try:
        stock = find_code(stock, qualname)
    except ValueError:
        # The function has another name or is there twice: a stand-in is live instead.
        stock = find_code(
            compile(case.function.file_text(case.function.lines), str(file), "exec"), qualname
        )
    module = live_module("mutant", file, qualname, stock)
    function = live_function(module, qualname)
    try:
        editor = SourceEditor(module, str(file), hashlib.sha256(source).hexdigest())
        editor.set_active({case.fix: case.edits})
    except EditRefused:
        return "refused" if function.__code__ is stock else "refused, and yet changed"
    edited = function.__code__
    try:
        text = case.function.file_text(patch(lines, case.operations))
        patched = compile(text, str(file), "exec", dont_inherit=True)
    except (Inapplicable, SyntaxError) as reason:
        return f"edited where the patch cannot be made: {reason}"
    if comparable(edited) != comparable(find_code(patched, qualname)):
        # The compiler keeps a NOP for a line that would have no instruction, so that the lines
        # of what was inserted can show in the code (before a `return` in a new `with`).
        tree = ast.parse(source)
        for edit in resolve(case.edits, tree):
            edit.apply(tree)
        if ast.dump(tree) != ast.dump(ast.parse(text)):
            return "edited, but not to what the patch makes"
    unknown = read_globals(edited) - read_globals(stock) - {*dir(builtins)}
    if unknown:
        return f"edited to read what is not there: {sorted(unknown)}"
    editor.set_active({})
    return "equal" if function.__code__ is stock else "not undone"


def fault(verdict: str) -> bool:
    return verdict not in ("refused", "equal")


@each_function
def test_each_mutant_is_refused_or_edited_as_its_text_is_patched(
    names: tuple[str, str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    case = target(*names)
    assert judge(case, case.function.lines, tmp_path) == "equal"
    verdicts: Counter[str] = Counter()
    faults = []
    different: set[str] = set()
    for number in itertools.count():
        kind, lines = mutant(case.function, case.focus, f"{case} {number}")
        text = case.function.file_text(lines)
        if text in different:
            continue
        different.add(text)
        verdict = judge(case, lines, tmp_path)
        verdicts[verdict if not fault(verdict) else "faults"] += 1
        if fault(verdict):
            faults.append(f"mutant {number} ({kind}): {verdict}")
        if len(different) == MUTANTS:
            break
    counts = ", ".join(f"{count} {verdict}" for verdict, count in sorted(verdicts.items()))
    with capsys.disabled():
        print(f"\n{case}: {MUTANTS} different mutants: {counts}")
    assert not faults, "\n".join(faults)
    # Edits that refuse everything, or mutants that change nothing of interest, prove nothing.
    assert min(verdicts["refused"], verdicts["equal"]) >= MUTANTS // 10


# --- the check of the check -------------------------------------------------------------------


def broken_edits(edits: Sequence[Edit]) -> Iterator[tuple[Edit, ...]]:
    """The edits with one step left out or spoilt, each way that fits its kind."""
    for place, edit in enumerate(edits):
        if not isinstance(edit, EditFunction):
            continue
        for number, step in enumerate(edit.steps):
            for spoilt in [[], *([other] for other in _spoilt(step))]:
                steps = (*edit.steps[:number], *spoilt, *edit.steps[number + 1 :])
                yield (*edits[:place], replace(edit, steps=steps), *edits[place + 1 :])


def _spoilt(step: Step) -> Iterator[Step]:
    if isinstance(step, Move):
        yield replace(step, before="max_query_len = ...")
        yield replace(step, statements="\n".join(_first_statement(step.statements)))
    elif isinstance(step, Insert):
        yield replace(step, before=step.after, after=step.before)
        yield replace(step, code=step.code + "\nself.steps = 0")
    elif isinstance(step, Wrap):
        yield replace(step, context="self.other()")
    elif isinstance(step, Rename):
        for name in step.names:
            yield replace(step, names={k: v for k, v in step.names.items() if k != name})


def _first_statement(pattern: str) -> list[str]:
    lines = pattern.splitlines()
    end = next((n for n, line in enumerate(lines[1:], 1) if line and line[0].isalpha()), len(lines))
    return lines[:end]


def sample(case: Target, number: int) -> list[Sequence[Line]]:
    return [
        case.function.lines,
        *(mutant(case.function, case.focus, f"sample {n}")[1] for n in range(number)),
    ]


@each_function
def test_a_broken_edit_is_noticed(names: tuple[str, str, str], tmp_path: Path) -> None:
    case = target(*names)
    mutants = sample(case, 20)
    good = [judge(case, lines, tmp_path) for lines in mutants]
    for edits in broken_edits(case.edits):
        verdicts = [judge(replace(case, edits=edits), lines, tmp_path) for lines in mutants]
        assert "equal" not in verdicts, f"not noticed: {edits}"
        # On some step a broken edit may just be refused, but not where it can be made.
        if verdicts[0] != "refused":
            assert all(fault(bad) for ok, bad in zip(good, verdicts, strict=True) if ok == "equal")


@each_function
def test_edits_that_are_not_strict_about_the_place_are_noticed(
    names: tuple[str, str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def any_place(found: Sequence[Any], pattern: str) -> Any:
        if not found:
            raise EditRefused("no place")
        return found[0]

    monkeypatch.setattr(code_edit, "_only", any_place)
    case = target(*names)
    assert any(fault(judge(case, lines, tmp_path)) for lines in sample(case, 200))
