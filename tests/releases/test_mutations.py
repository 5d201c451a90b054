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
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any

import pytest

from vllm_cgfix import code_edit
from vllm_cgfix.code_edit import (
    AddField,
    AddKeyword,
    AddParameter,
    Edit,
    EditFunction,
    EditRefused,
    Expect,
    Guard,
    Insert,
    Move,
    OneOf,
    Rename,
    Replace,
    SourceEditor,
    Step,
    Wrap,
    find_function,
    function_names,
    resolve,
)
from vllm_cgfix.fix import module_path
from vllm_cgfix.fixes import CATALOGUE, by_id

from . import patches
from .class_mutants import class_mutant, execute, picture, read_class
from .mutants import mutant
from .sources import source_dir
from .text import FunctionText, Inapplicable, Line, Operation, patch

# "x is not 7" is what a mutant may say.
pytestmark = pytest.mark.filterwarnings("ignore::SyntaxWarning")

MUTANTS = 600
"""For each fix: all texts of its functions have an equal share, of ``LEAST`` or more."""
LEAST = 40
THOROUGH = ("dispatch-order", "skip-attention")
"""The fixes with so many mutants for each release: what they change is long and intricate."""

IGNORED = {"co_firstlineno", "co_linetable", "co_lnotab", "co_filename"}


@dataclass(frozen=True)
class Target:
    """One function that a fix edits, in releases that have the same text of it.

    Attributes:
        edits: those of the fix's edits of the module that are for this function.
        operations: the same as a patch.
    """

    fix: str
    releases: tuple[str, ...]
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

    @property
    def taken(self) -> tuple[str, ...]:
        """The names that the patch brings along: imports at the top, and parameters."""
        texts = [getattr(operation, "text", "") for operation in self.operations]
        found = [re.match(r"from [\w.]+ import (\w+)$|(\w+)=\w+,$", text) for text in texts]
        return tuple(match[1] or match[2] for match in found if match)

    def __str__(self) -> str:
        return f"{self.fix} {self.releases[0]} {self.function.qualname}"


@dataclass(frozen=True)
class Patch:
    """An entry of a patch file.

    Attributes:
        share: how many mutants.
    """

    fix: str
    qualname: str
    releases: tuple[str, ...]
    operations: Sequence[Operation] = field(repr=False)
    share: int

    def __str__(self) -> str:
        return f"{self.fix}-{self.qualname}-{self.releases[0]}"


def patch_entries() -> list[Patch]:
    """Everything in the patch files."""
    found = []
    for name in sorted(module.name for module in pkgutil.iter_modules(patches.__path__)):
        fix = name.replace("_", "-")
        functions = importlib.import_module(f"{patches.__name__}.{name}").PATCHES
        groups = [releases for texts in functions.values() for releases in texts]
        in_release = Counter(release for releases in groups for release in releases)
        for qualname, texts in functions.items():
            for releases, operations in texts.items():
                sharers = min(in_release[release] for release in releases)
                if fix not in THOROUGH:
                    sharers = len(groups)
                share = max(LEAST, MUTANTS // sharers)
                found.append(Patch(fix, qualname, releases, operations, share))
    return found


each_function = pytest.mark.parametrize("entry", patch_entries(), ids=str)


@cache
def function_text(release: str, module: str, qualname: str) -> FunctionText:
    return FunctionText.read(source_dir(release) / module_path(module), qualname)


def target(entry: Patch) -> Target:
    ((module, edits),) = (
        (module, found)
        for module, edits in by_id(entry.fix).edits.items()
        if (found := _for(entry.qualname, edits))
    )
    function, *others = (
        function_text(release, module, entry.qualname) for release in entry.releases
    )
    assert all(other.lines == function.lines for other in others), "not the same text"
    return Target(entry.fix, entry.releases, function, edits, entry.operations)


def test_every_function_of_every_release_has_a_patch() -> None:
    for fix in CATALOGUE:
        for release in fix.releases:
            entries = [e for e in patch_entries() if e.fix == fix.id and release in e.releases]
            patched = [entry.qualname for entry in entries]
            assert len(set(patched)) == len(patched)
            edited: list[str] = []
            edits_there = fix.for_release(release).edits.values()
            for edit in (edit for edits in edits_there for edit in edits):
                parts = edit.alternatives if isinstance(edit, OneOf) else ((edit,),)
                fitting = {
                    names
                    for part in parts
                    if {*(names := tuple(function_names(part)))} <= {*patched}
                }
                # Where there is something to do, nothing to do is no alternative.
                (names,) = fitting - ({()} if len(fitting) > 1 else set())
                edited += names
            assert sorted(edited) == sorted(patched), f"{fix} {release}"


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


def new_defaults(stock: ast.Module, patched: ast.Module, qualname: str) -> tuple[object, ...]:
    """The defaults that a patch adds to a function's."""
    old, new = (find_function(tree, qualname).args.defaults for tree in (stock, patched))
    return tuple(map(ast.literal_eval, new[len(old) :]))


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
    for name in case.taken:
        if re.search(rf"\b{name}\b", source.decode()):
            return f"edited where `{name}` is something else"
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
    unknown = read_globals(edited) - read_globals(stock) - case.function.names - {*dir(builtins)}
    if unknown:
        return f"edited to read what is not there: {sorted(unknown)}"
    if edited.co_argcount > stock.co_argcount and function.__defaults__ != new_defaults(
        ast.parse(source), ast.parse(text), qualname
    ):
        return "edited, but the defaults are not those of the patch"
    editor.set_active({})
    return "equal" if function.__code__ is stock else "not undone"


def fault(verdict: str) -> bool:
    return verdict not in ("refused", "equal")


@each_function
def test_each_mutant_is_refused_or_edited_as_its_text_is_patched(
    entry: Patch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    case = target(entry)
    assert judge(case, case.function.lines, tmp_path) == "equal"
    verdicts: Counter[str] = Counter()
    faults = []
    different: set[str] = set()
    for number in itertools.count():
        kind, lines = mutant(case.function, case.focus, f"{case} {number}", case.taken)
        text = case.function.file_text(lines)
        if text in different:
            continue
        different.add(text)
        verdict = judge(case, lines, tmp_path)
        verdicts[verdict if not fault(verdict) else "faults"] += 1
        if fault(verdict):
            faults.append(f"mutant {number} ({kind}): {verdict}")
        if len(different) == entry.share:
            break
    counts = ", ".join(f"{count} {verdict}" for verdict, count in sorted(verdicts.items()))
    with capsys.disabled():
        print(f"\n{case}: {entry.share} different mutants: {counts}")
    assert not faults, "\n".join(faults)
    # Edits that refuse everything, or mutants that change nothing of interest, prove nothing.
    assert min(verdicts["refused"], verdicts["equal"]) >= entry.share // 30


# --- the dataclass ----------------------------------------------------------------------------

FORWARD_CONTEXT = AddField("ForwardContext", "skip_attention", bool, False)
LINE = "    skip_attention: bool = False"


def judge_class(
    header: str, lines: Sequence[str], folder: Path, added: AddField = FORWARD_CONTEXT
) -> str:
    """What became of a mutant of the class; as :func:`judge` says it."""
    name, file, patched = added.qualname, folder / "mutant.py", folder / "patched" / "mutant.py"
    patched.parent.mkdir(exist_ok=True)
    module, cls = execute("\n".join([header, *lines, ""]), file, name)
    module.__spec__ = importlib.machinery.ModuleSpec("mutant", None, origin=str(file))
    stock = dict(vars(cls))
    editor = SourceEditor(module, str(file), hashlib.sha256(file.read_bytes()).hexdigest())
    try:
        editor.set_active({"fix": (added,)})
    except EditRefused:
        return "refused" if dict(vars(cls)) == stock else "refused, and yet changed"
    assert editor.is_live("fix")
    try:
        _, expected = execute("\n".join([header, *lines, LINE, ""]), patched, name)
    except TypeError as reason:
        return f"edited where the patch cannot be made: {reason}"
    if FORWARD_CONTEXT.name in stock:
        return "edited where the name is something else"
    is_, should_be = picture(cls), picture(expected)
    different = [what for what, value in is_.items() if str(value) != str(should_be[what])]
    if different:
        return f"edited, but not to what the patch makes: {different}"
    editor.set_active({})
    return "equal" if dict(vars(cls)) == stock else "not undone"


FIX_OF_CLASS = by_id("skip-attention")


@pytest.mark.parametrize("release", ["0.17.0", "0.20.2", "0.27.0", "0.33.0"])
def test_each_mutant_of_the_class_is_refused_or_as_its_text_is_patched(
    release: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert FORWARD_CONTEXT in FIX_OF_CLASS.edits["vllm.forward_context"]
    header, lines = read_class(source_dir(release) / "vllm/forward_context.py", "ForwardContext")
    assert judge_class(header, lines, tmp_path) == "equal"
    verdicts: Counter[str] = Counter()
    for number in range(100):
        mutated = class_mutant(header, lines, tmp_path / "x.py", "ForwardContext", str(number))
        verdict = judge_class(header, mutated, tmp_path)
        assert not fault(verdict), f"mutant {number}: {verdict}\n" + "\n".join(mutated)
        verdicts[verdict] += 1
    with capsys.disabled():
        print(f"\nskip-attention {release} ForwardContext: 100 mutants: {dict(verdicts)}")
    assert min(verdicts["refused"], verdicts["equal"]) >= 10


@pytest.mark.parametrize(
    "spoilt",
    [{"name": "other"}, {"type": int}, {"default": True}],
    ids=str,
)
def test_a_broken_edit_of_the_class_is_noticed(spoilt: dict[str, Any], tmp_path: Path) -> None:
    header, lines = read_class(source_dir("0.33.0") / "vllm/forward_context.py", "ForwardContext")
    assert fault(judge_class(header, lines, tmp_path, replace(FORWARD_CONTEXT, **spoilt)))


def test_a_class_edit_that_is_not_strict_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the fields as they are in the class, and whatever else its source says."""
    header, lines = read_class(source_dir("0.33.0") / "vllm/forward_context.py", "ForwardContext")

    def anything(module: ModuleType, qualname: str, tree: ast.Module) -> Any:
        return code_edit._LiveDataclass(qualname, vars(module)[qualname])

    monkeypatch.setattr(code_edit._LiveDataclass, "check", anything)
    mutants = (
        class_mutant(header, lines, tmp_path / "x.py", "ForwardContext", str(n)) for n in range(100)
    )
    verdicts = []
    for mutated in mutants:
        try:
            verdicts.append(judge_class(header, mutated, tmp_path))
        except Exception:
            verdicts.append("raised")
    assert sum(map(fault, verdicts)) > 5


# --- the check of the check -------------------------------------------------------------------


def changed_steps(
    edits: Sequence[Edit], changes: Callable[[Step], Iterable[Sequence[Step]]]
) -> Iterator[tuple[Edit, ...]]:
    """The edits with one step replaced, in each of the ways that ``changes`` tells for a step."""
    for place, edit in enumerate(edits):
        if isinstance(edit, OneOf):
            for which, parts in enumerate(edit.alternatives):
                for changed in changed_steps(parts, changes):
                    alternatives = [*edit.alternatives]
                    alternatives[which] = changed  # type: ignore[assignment]
                    yield (*edits[:place], OneOf(tuple(alternatives)), *edits[place + 1 :])
        elif isinstance(edit, EditFunction):
            for number, step in enumerate(edit.steps):
                for new in changes(step):
                    steps = (*edit.steps[:number], *new, *edit.steps[number + 1 :])
                    yield (*edits[:place], replace(edit, steps=steps), *edits[place + 1 :])


def made(case: Target) -> list[Edit]:
    """The edits that fit the stock text."""
    return [*resolve(case.edits, ast.parse(case.function.file_text(case.function.lines)))]


def left_out_or_spoilt(step: Step) -> Iterator[Sequence[Step]]:
    """Each way that fits the kind of a step."""
    if not isinstance(step, Expect):  # which changes nothing
        yield from ([], *([other] for other in _spoilt(step)))


def _spoilt(step: Step) -> Iterator[Step]:
    if isinstance(step, Move):
        yield replace(step, before="max_query_len = ...")
        yield replace(step, statements="\n".join(_first_statement(step.statements)))
    elif isinstance(step, Insert):
        yield replace(step, before=step.after, after=step.before)
        yield replace(step, code=step.code + "\nself.steps = 0")
    elif isinstance(step, Wrap):
        yield replace(step, context="self.other()")
    elif isinstance(step, Guard):
        yield replace(step, condition="self.other()")
    elif isinstance(step, Rename):
        for name in step.names:
            yield replace(step, names={k: v for k, v in step.names.items() if k != name})
    elif isinstance(step, Replace):
        yield replace(step, by="None")
    elif isinstance(step, AddKeyword):
        yield replace(step, value="None")
        yield replace(step, keyword="other")
    elif isinstance(step, AddParameter):
        yield replace(step, default=not step.default)


def _first_statement(pattern: str) -> list[str]:
    lines = pattern.splitlines()
    end = next((n for n, line in enumerate(lines[1:], 1) if line and line[0].isalpha()), len(lines))
    return lines[:end]


def sample(case: Target, number: int) -> Iterator[Sequence[Line]]:
    """The stock text and some mutants."""
    yield case.function.lines
    for n in range(number):
        yield mutant(case.function, case.focus, f"sample {n}", case.taken)[1]


@each_function
def test_a_broken_edit_is_noticed(entry: Patch, tmp_path: Path) -> None:
    case = target(entry)
    mutants = [*sample(case, min(20, entry.share // 10))]
    fitting = tuple(made(case))
    good = [judge(replace(case, edits=fitting), lines, tmp_path) for lines in mutants]
    for edits in changed_steps(fitting, left_out_or_spoilt):
        verdicts = [judge(replace(case, edits=edits), lines, tmp_path) for lines in mutants]
        assert "equal" not in verdicts, f"not noticed: {edits}"
        # On some step a broken edit may just be refused, but not where it can be made.
        if verdicts[0] != "refused":
            assert all(fault(bad) for ok, bad in zip(good, verdicts, strict=True) if ok == "equal")


@each_function
def test_edits_that_are_not_strict_about_the_place_are_noticed(
    entry: Patch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def any_place(found: Sequence[Any], pattern: str) -> Any:
        if not found:
            raise EditRefused("no place")
        return found[0]

    class AnyNumber(int):
        def __ne__(self, other: object) -> bool:
            return False

    def any_number(step: Step) -> Iterator[Sequence[Step]]:
        if isinstance(step, Wrap):
            yield [replace(step, times=AnyNumber(), within=None, after=None)]

    monkeypatch.setattr(code_edit, "_only", any_place)
    case = target(entry)
    fitting = tuple(made(case))
    for edits in (*changed_steps(fitting, any_number), fitting):
        loose = replace(case, edits=edits)
        if any(fault(judge(loose, lines, tmp_path)) for lines in sample(case, 200)):
            return
    pytest.fail("nothing is noticed")
