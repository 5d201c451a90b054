"""Every fix is found, edited and compiled on each Python that a release allows and that is here.

Interpreters are looked for on ``PATH`` and among pyenv's versions; they need no packages. A Python
that is not here is skipped, and nothing is claimed about it.
"""

from __future__ import annotations

import ast
import functools
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import CodeType
from typing import Any

import pytest
from packaging.specifiers import SpecifierSet

from tests.needs import needed
from vllm_cgfix.code_edit import EditFunction, EditRefused, Insert, Step
from vllm_cgfix.fix import Fix
from vllm_cgfix.fixes import CATALOGUE, by_id

from . import compile_check
from .sources import RELEASES, source_dir

PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
"""From the plugin's oldest to the newest that a supported release allows."""


def candidates(version: str) -> Iterator[str]:
    if sys.version_info[:2] == tuple(map(int, version.split("."))):
        yield sys.executable
    for folder in os.get_exec_path():
        yield from filter(None, [shutil.which(f"python{version}", path=folder)])
    root = os.environ.get("PYENV_ROOT", "")
    if not root and shutil.which("pyenv"):
        root = subprocess.run(["pyenv", "root"], capture_output=True, text=True).stdout.strip()
    for python in sorted((Path(root) / "versions").glob(f"{version}*/bin/python") if root else ()):
        yield str(python)


@functools.cache
def interpreter(version: str) -> str | None:
    """A working interpreter of this version; None where there is none."""
    for python in candidates(version):
        # What is on PATH may be one of pyenv's shims for a version that is not installed.
        code = "import sys; print('.'.join(map(str, sys.version_info[:2])))"
        done = subprocess.run([python, "-c", code], capture_output=True, text=True)
        if done.returncode == 0 and done.stdout.strip() == version:
            return python
    return None


def allowed(release: str, version: str) -> bool:
    (metadata,) = source_dir(release).glob("vllm-*.dist-info/METADATA")
    for line in metadata.read_text("utf-8").splitlines():
        name, _, value = line.partition(":")
        if name == "Requires-Python":
            # The newest patch release, for a bound such as ">=3.9.2".
            return f"{version}.99" in SpecifierSet(value)
    raise AssertionError(f"{metadata} does not say which Python it is for")


@pytest.mark.parametrize("options", [(), ("-O",)], ids=["plain", "optimized"])
@pytest.mark.parametrize("version", PYTHONS)
def test_every_fix_on_every_python_of_its_releases(
    version: str, options: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    python = interpreter(version)
    if python is None:
        pytest.skip(f"no Python {version} on PATH or among pyenv's versions")
    in_need = {release for fix in CATALOGUE for release in fix.releases}
    # What -O changes is the compiled code: of no interest where everything is refused.
    releases = [r for r in RELEASES if allowed(r, version) and (not options or r in in_need)]
    done = subprocess.run(
        [
            *(python, *options, compile_check.__file__),
            *(f"{release}={source_dir(release)}" for release in releases),
        ],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == len(releases) * len(CATALOGUE)
    outcomes = Counter(line.partition(": ")[2] for line in lines)
    counts = ", ".join(f"{count} {outcome}" for outcome, count in sorted(outcomes.items()))
    with capsys.disabled():
        print(f"\nPython {' '.join((version, *options))}: {len(releases)} releases: {counts}")
    assert outcomes["edited, needed"] == sum(
        r in fix.releases for fix in CATALOGUE for r in releases
    )


# --- the check of the check -------------------------------------------------------------------


@dataclass(frozen=True)
class Spoil:
    """A step that does to the function's tree what no edit may do."""

    change: Callable[[Any], object]

    def apply(self, function: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self.change(function)


MODULE = "vllm.v1.worker.gpu_model_runner"
QUALNAME = "GPUModelRunner._dummy_run"


def wrong(*steps: Step) -> str:
    fix = replace(by_id("dispatch-order"), edits={MODULE: (EditFunction(QUALNAME, steps),)})
    return "; ".join(compile_check.check_module(fix, MODULE, source_dir("0.11.2")))


def test_an_edit_that_keeps_everything_passes() -> None:
    assert wrong(Insert("pass; self.steps = 0", before="attn_metadata: ... = None")) == ""


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda function: None, f"{QUALNAME} is as it was"),
        (lambda function: function.args.args.append(ast.arg("more")), "has 12 arguments"),
        (lambda function: ast.increment_lineno(function.body[-1], 500), "names the lines"),
        (lambda function: function.decorator_list.clear(), "is not at line"),
        (lambda function: setattr(function, "name", "other"), "is not at line"),
        (lambda function: function.body.append(*ast.parse("yield").body), "another co_flags"),
    ],
)
def test_what_an_edit_may_not_change_is_noticed(
    change: Callable[[Any], object], message: str
) -> None:
    assert message in wrong(Spoil(change))


def test_a_compiler_that_leaks_its_own_future_imports_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def compiled(tree: ast.Module, file: Path) -> CodeType:
        return compile(tree, str(file), "exec")

    monkeypatch.setattr(compile_check, "compiled", compiled)
    assert "as the import system does" in wrong()


def test_a_release_that_needs_a_fix_and_does_not_take_it_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(fix: Fix, module: str, sources: Path) -> list[str]:
        raise EditRefused("not here")

    monkeypatch.setattr(compile_check, "check_module", refuse)
    found = [*compile_check.check("0.11.2", source_dir("0.11.2"))]
    assert [line for well, line in found if not well] == [
        f"0.11.2 {fix.id}: not here" for fix in needed("0.11.2")
    ]
