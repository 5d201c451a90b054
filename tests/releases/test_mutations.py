"""Structure decides (``VLLM_CGFIX_UNVERIFIED=1``): on random mutants of the edited functions.

Each mutant is either refused whole, or its edited code is that of the same mutant with the change
made in its text by a patch that knows nothing of the edits (``tests/releases/patches``).
"""

from __future__ import annotations

import dis
import hashlib
import importlib
import importlib.machinery
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any

import pytest

from vllm_cgfix import code_edit
from vllm_cgfix.code_edit import EditFunction, EditRefused, Insert, Move, Rename, SourceEditor, Wrap
from vllm_cgfix.fix import module_path
from vllm_cgfix.fixes import CATALOGUE

from .mutants import mutant
from .sources import source_dir
from .text import FunctionText, Inapplicable, Line, Operation, patch

MUTANTS = 600
"""For each edited function of each release."""

IGNORED = {"co_firstlineno", "co_linetable", "co_lnotab", "co_filename"}


@dataclass(frozen=True)
class Target:
    """One function that a fix edits in one release."""

    fix: str
    release: str
    edit: EditFunction
    function: FunctionText = field(repr=False)
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
        return f"{self.fix} {self.release} {self.edit.qualname}"


def patches(fix_id: str) -> dict[str, dict[str, Sequence[Operation]]]:
    """The patch file of a fix: release, to qualified name, to operations."""
    name = fix_id.replace("-", "_")
    found: dict[str, dict[str, Sequence[Operation]]] = importlib.import_module(
        f"tests.releases.patches.{name}"
    ).PATCHES
    return found


def edited_functions() -> list[tuple[str, str, str, str]]:
    return [
        (fix.id, release, module, edit.qualname)
        for fix in CATALOGUE
        for release in fix.releases
        for module, edits in fix.edits.items()
        for edit in edits
    ]


def target(fix_id: str, release: str, module: str, qualname: str) -> Target:
    (fix,) = (fix for fix in CATALOGUE if fix.id == fix_id)
    (edit,) = (edit for edit in fix.edits[module] if edit.qualname == qualname)
    file = source_dir(release) / module_path(module)
    return Target(
        fix_id,
        release,
        edit,
        FunctionText.read(file, qualname),
        patches(fix_id)[release][qualname],
    )


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
    qualname = case.edit.qualname
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
        editor.set_active({case.fix: (case.edit,)})
    except EditRefused:
        return "refused" if function.__code__ is stock else "refused, and yet changed"
    edited = function.__code__
    try:
        text = case.function.file_text(patch(lines, case.operations))
        patched = compile(text, str(file), "exec", dont_inherit=True)
    except (Inapplicable, SyntaxError) as reason:
        return f"edited where the patch cannot be made: {reason}"
    if comparable(edited) != comparable(find_code(patched, qualname)):
        return "edited, but not to what the patch makes"
    unknown = read_globals(edited) - read_globals(stock)
    if unknown:
        return f"edited to read what is not there: {sorted(unknown)}"
    editor.set_active({})
    return "equal" if function.__code__ is stock else "not undone"


def fault(verdict: str) -> bool:
    return verdict not in ("refused", "equal")


@pytest.mark.parametrize("names", edited_functions(), ids=lambda names: "-".join(names[:2]))
def test_each_mutant_is_refused_or_edited_as_its_text_is_patched(
    names: tuple[str, str, str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    case = target(*names)
    assert judge(case, case.function.lines, tmp_path) == "equal"
    verdicts: Counter[str] = Counter()
    faults = []
    different = set()
    for number in range(MUTANTS):
        kind, lines = mutant(case.function, case.focus, f"{case} {number}")
        different.add(tuple(line.text for line in lines))
        verdict = judge(case, lines, tmp_path)
        verdicts[verdict if not fault(verdict) else "faults"] += 1
        if fault(verdict):
            faults.append(f"mutant {number} ({kind}): {verdict}")
    counts = ", ".join(f"{count} {verdict}" for verdict, count in sorted(verdicts.items()))
    with capsys.disabled():
        print(f"\n{case}: {MUTANTS} mutants ({len(different)} different): {counts}")
    assert not faults, "\n".join(faults)
    assert len(different) >= 500
    # Edits that refuse everything, or mutants that change nothing of interest, prove nothing.
    assert min(verdicts["refused"], verdicts["equal"]) >= MUTANTS // 10


# --- the check of the check -------------------------------------------------------------------


def _without(index: int) -> Callable[[EditFunction], EditFunction]:
    return lambda edit: replace(edit, steps=edit.steps[:index] + edit.steps[index + 1 :])


def _with(index: int, **changes: Any) -> Callable[[EditFunction], EditFunction]:
    def change(edit: EditFunction) -> EditFunction:
        steps = list(edit.steps)
        steps[index] = replace(steps[index], **changes)  # type: ignore[type-var]
        return replace(edit, steps=tuple(steps))

    return change


def broken_edits(edit: EditFunction) -> list[EditFunction]:
    """The edit with one step left out or spoilt, each way that fits its kind."""
    broken = []
    for index, step in enumerate(edit.steps):
        ways = [_without(index)]
        if isinstance(step, Move):
            ways.append(_with(index, before="max_query_len = ..."))
            ways.append(_with(index, statements="\n".join(_first_statement(step.statements))))
        elif isinstance(step, Insert):
            ways.append(_with(index, before=step.after, after=step.before))
            ways.append(_with(index, code=step.code + "\npass; self.steps = 0"))
        elif isinstance(step, Wrap):
            ways.append(_with(index, context="self.other()"))
        elif isinstance(step, Rename):
            ways += [
                _with(index, names={k: v for k, v in step.names.items() if k != name})
                for name in step.names
            ]
        broken += [way(edit) for way in ways]
    return broken


def _first_statement(pattern: str) -> list[str]:
    lines = pattern.splitlines()
    end = next((n for n, line in enumerate(lines[1:], 1) if line and line[0].isalpha()), len(lines))
    return lines[:end]


def sample(case: Target, number: int) -> list[Sequence[Line]]:
    return [
        case.function.lines,
        *(mutant(case.function, case.focus, f"sample {n}")[1] for n in range(number)),
    ]


@pytest.mark.parametrize("names", edited_functions(), ids=lambda names: "-".join(names[:2]))
def test_a_broken_edit_is_noticed(names: tuple[str, str, str, str], tmp_path: Path) -> None:
    case = target(*names)
    mutants = sample(case, 20)
    good = [judge(case, lines, tmp_path) for lines in mutants]
    for edit in broken_edits(case.edit):
        verdicts = [judge(replace(case, edit=edit), lines, tmp_path) for lines in mutants]
        assert "equal" not in verdicts, f"not noticed: {edit}"
        # On some step a broken edit may just be refused, but not where it can be made.
        if verdicts[0] != "refused":
            assert all(fault(bad) for ok, bad in zip(good, verdicts, strict=True) if ok == "equal")


@pytest.mark.parametrize("names", edited_functions()[-1:], ids=lambda names: "-".join(names[:2]))
def test_edits_that_are_not_strict_about_the_place_are_noticed(
    names: tuple[str, str, str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def any_place(found: Sequence[Any], pattern: str) -> Any:
        if not found:
            raise EditRefused("no place")
        return found[0]

    monkeypatch.setattr(code_edit, "_only", any_place)
    case = target(*names)
    assert any(fault(judge(case, lines, tmp_path)) for lines in sample(case, 200))
