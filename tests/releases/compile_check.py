"""Edit and compile the sources of releases with the interpreter that runs this file.

    python [-O] tests/releases/compile_check.py 0.11.2=FOLDER 0.33.0=FOLDER ...

FOLDER holds the release's ``vllm``. Nothing beyond the standard library is needed, and nothing of
vLLM is imported. One line is printed for each release and fix; exit code 1 where a check fails.
"""

from __future__ import annotations

import ast
import importlib.machinery
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import CodeType

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from vllm_cgfix.code_edit import EditFunction, EditRefused, find_function, resolve
from vllm_cgfix.decision import Decider, ReleaseTable
from vllm_cgfix.fix import Fix, State, module_path
from vllm_cgfix.fixes import CATALOGUE
from vllm_cgfix.installation import Installation


def loaded_code(file: Path) -> CodeType:
    """What an import of the file would execute, compiled afresh."""
    code = importlib.machinery.SourceFileLoader("module", str(file)).get_code("module")
    assert code is not None
    return code


def compiled(tree: ast.Module, file: Path) -> CodeType:
    return compile(tree, str(file), "exec", dont_inherit=True, optimize=sys.flags.optimize)


def nested(code: CodeType) -> list[CodeType]:
    return [constant for constant in code.co_consts if isinstance(constant, CodeType)]


def by_path(code: CodeType, qualname: str, first_line: int) -> CodeType | None:
    found = [code]
    for name in qualname.split("."):
        found = [inner for outer in found for inner in nested(outer) if inner.co_name == name]
    return next((code for code in found if code.co_firstlineno == first_line), None)


def changed(old: CodeType, new: CodeType, path: str = "") -> Iterator[str]:
    """The paths of the code objects that differ, less those around them."""
    if old == new:
        return

    def alone(code: CodeType) -> CodeType:
        constants = (c for c in code.co_consts if not isinstance(c, CodeType))
        return code.replace(co_consts=tuple(constants))

    # Unequal numbers show as a change of their owner.
    inner = zip(nested(old), nested(new), strict=False)
    if len(nested(old)) != len(nested(new)) or alone(old) != alone(new):
        yield path
    for old_inner, new_inner in inner:
        yield from changed(old_inner, new_inner, f"{path}.{old_inner.co_name}".lstrip("."))


def lines(code: CodeType) -> set[int]:
    own = {line for _, _, line in code.co_lines() if line is not None}
    return own.union(*map(lines, nested(code)))


def check_module(fix: Fix, module: str, sources: Path) -> list[str]:
    """Edit one module; a sentence for each thing that is wrong.

    Raises:
        EditRefused: the structure is another.
    """
    file = sources / module_path(module)
    tree = ast.parse(file.read_bytes(), str(file))
    edits = resolve(fix.edits[module], tree)
    stock_file = compiled(tree, file)
    wrong = []
    if stock_file != loaded_code(file):
        wrong.append("the unedited file is not compiled as the import system does")
    ranges = {}
    for edit in edits:
        if isinstance(edit, EditFunction):
            node = find_function(tree, edit.qualname)
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            ranges[edit.qualname] = range(first, (node.end_lineno or 0) + 1)
    for edit in edits:
        edit.apply(tree)
    edited_file = compiled(ast.fix_missing_locations(tree), file)
    for edit in edits:
        if not isinstance(edit, EditFunction):
            continue
        lines_of = ranges[edit.qualname]
        stock = by_path(stock_file, edit.qualname, lines_of[0])
        edited = by_path(edited_file, edit.qualname, lines_of[0])
        if stock is None or edited is None:
            wrong.append(f"{edit.qualname} is not at line {lines_of[0]}")
            continue
        kept = ["co_name", "co_filename", "co_flags", "co_freevars", "co_posonlyargcount"]
        kept += ["co_kwonlyargcount", "co_firstlineno", "co_qualname"]
        for name in kept:
            if getattr(stock, name, None) != getattr(edited, name, None):
                wrong.append(f"{edit.qualname} has another {name}")
        if edited.co_argcount != stock.co_argcount + len(edit.added_defaults):
            wrong.append(f"{edit.qualname} has {edited.co_argcount} arguments")
        if edited == stock:
            wrong.append(f"{edit.qualname} is as it was")
        if not lines(edited) <= {*lines_of}:
            wrong.append(f"{edit.qualname} names the lines {lines(edited) - {*lines_of}}")
    # Of a function with an added parameter the default is set where it is defined.
    owners = {
        edit.qualname.rpartition(".")[0]
        for edit in edits
        if isinstance(edit, EditFunction) and edit.added_defaults
    }
    allowed = owners | {edit.qualname for edit in edits}
    for path in changed(stock_file, edited_file):
        if path not in allowed and not path.startswith(tuple(f"{name}." for name in allowed)):
            wrong.append(f"{path or 'the module'} was changed as well")
    return wrong


def check(release: str, sources: Path) -> Iterator[tuple[bool, str]]:
    """For each fix whether all is well, and the line to print."""
    decider = Decider(Installation(str(sources / "vllm")), ReleaseTable.load())
    for fix in CATALOGUE:
        needed = release in fix.releases
        wrong = []
        decided = decider.decide(fix, unverified=True)
        if decided.state is not (State.PENDING if needed else State.NOT_NEEDED):
            wrong.append(f"decided to be {decided.state.value}")
        outcome = "edited"
        try:
            for module in decided.fix.edits:
                if not (sources / module_path(module)).exists():
                    raise EditRefused(f"there is no {module}")
                wrong += check_module(fix, module, sources)
        except EditRefused as reason:
            outcome = "refused"
            if needed:
                wrong.append(str(reason))
        text = "; ".join(wrong) or f"{outcome}, {'needed' if needed else 'not needed'}"
        yield not wrong, f"{release} {fix.id}: {text}"


def main() -> int:
    sys.dont_write_bytecode = True
    sys.pycache_prefix = os.devnull  # none is read, either
    ok = True
    for argument in sys.argv[1:]:
        release, _, folder = argument.partition("=")
        for well, line in check(release, Path(folder)):
            ok &= well
            print(line if well else f"FAILED {line}", flush=True)
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
