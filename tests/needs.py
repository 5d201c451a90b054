"""What releases need and what is said of it, out of the catalogue: no test lists the fixes."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping

from tests.releases.sources import source_dir
from vllm_cgfix.code_edit import EditFunction, resolve
from vllm_cgfix.fix import Fix, module_path
from vllm_cgfix.fixes import CATALOGUE


def needed(release: str) -> list[Fix]:
    """The fixes that a release needs, with its edits, in the order of the catalogue."""
    return [fix.for_release(release) for fix in CATALOGUE if release in fix.releases]


def modules(fixes: Iterable[Fix]) -> list[str]:
    """The modules that fixes edit, each once."""
    return [*dict.fromkeys(module for fix in fixes for module in fix.edits)]


def functions(fix: Fix, release: str) -> dict[str, list[str]]:
    """Module to the qualified names of the functions that a fix edits in a release."""
    found = {}
    for module, edits in fix.for_release(release).edits.items():
        tree = ast.parse((source_dir(release) / module_path(module)).read_bytes())
        made = resolve(edits, tree)
        found[module] = [edit.qualname for edit in made if isinstance(edit, EditFunction)]
    return found


def applied_lines(fixes: Iterable[Fix]) -> list[str]:
    """What a process logs of fixes once they are applied, sorted: their order is the imports'."""
    return sorted(f"vllm-cgfix: {fix.id} applied ({fix.scope})" for fix in fixes)


def states_with_all(release: str, needed_are: str, *, off: str = "") -> dict[str, str]:
    """Fix id to state where all are asked for, or all but the one that is ``off``."""
    found = {fix.id: needed_are if release in fix.releases else "not-needed" for fix in CATALOGUE}
    return {**found, off: "off"} if off else found


def decision(states: Mapping[str, str]) -> str:
    """How a process's log words its decision, in these states."""
    return ", ".join(f"{fix_id} {state}" for fix_id, state in states.items() if state != "off")
