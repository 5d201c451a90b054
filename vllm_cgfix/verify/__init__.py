"""The reproductions: each shows its fault on the real vLLM that is installed, and shows it gone.

One module a fix, named by its id with ``_`` for ``-``. A reproduction is run as
``python -m vllm_cgfix.verify.MODULE --json`` in a process of its own, since it takes a whole vLLM
apart; its last line of output is a JSON object with

``vllm``
    the version of the vLLM that ran;
``faults``
    sentences, one for each way in which the fault showed; empty if it did not;
``requirements``
    ``{"name", "ok", "detail"}`` for each thing that must also hold once the fix is applied;
``observations``
    the raw material of both;
``status``
    fix id to state, as :func:`vllm_cgfix.status` has it at the end;
``text``
    the same for a reader, as a table.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..fix import Fix


class ReproductionFailed(RuntimeError):
    """A reproduction could not be carried out; the message ends with its output."""


@dataclass(frozen=True)
class Outcome:
    """What a reproduction found.

    Attributes:
        vllm: version of the vLLM that ran.
        faults: how the fault showed, in sentences; empty if it did not.
        requirements: what else must hold with the fix, each ``{"name", "ok", "detail"}``.
        observations: everything that was recorded.
        status: fix id to state at the end.
        text: the same for a reader: a table.
    """

    vllm: str
    faults: list[str]
    requirements: list[dict[str, Any]] = field(default_factory=list)
    observations: dict[str, Any] = field(default_factory=dict)
    status: dict[str, str] = field(default_factory=dict)
    text: str = ""

    @property
    def unmet(self) -> list[str]:
        """The requirements that do not hold."""
        return [f"{r['name']}: {r['detail']}" for r in self.requirements if not r["ok"]]


def reproduction_of(fix: Fix) -> str:
    """The name of the module that is the reproduction of a fix."""
    return f"{__name__}.{fix.id.replace('-', '_')}"


def reproduce(
    fix: Fix,
    *,
    with_plugin: bool,
    environ: Mapping[str, str] | None = None,
    arguments: tuple[str, ...] = (),
    timeout: float = 600,
) -> Outcome:
    """Run the reproduction of a fix in a fresh process.

    Args:
        fix: the fix.
        with_plugin: whether the fix is switched on there, or the plugin is off.
        environ: the environment to use instead of this process's.
        arguments: passed on to the reproduction.
        timeout: seconds after which it is given up.

    Raises:
        ReproductionFailed: it crashed, printed no result, or took too long.
    """
    inherited = os.environ if environ is None else environ
    variables = {k: v for k, v in inherited.items() if not k.startswith("VLLM_CGFIX")}
    variables.pop("PYTHONDONTWRITEBYTECODE", None)  # else vLLM is compiled anew in every run
    variables["VLLM_CGFIX"] = fix.id if with_plugin else "off"
    module = reproduction_of(fix)
    try:
        process = subprocess.run(
            [sys.executable, "-m", module, "--json", *arguments],
            capture_output=True,
            text=True,
            env=variables,
            timeout=timeout,
        )
    except subprocess.TimeoutExpired as expired:
        raise ReproductionFailed(
            f"{module} did not end within {timeout} s\n{expired.stdout!r}"
        ) from None
    lines = process.stdout.rstrip().splitlines()
    try:
        return Outcome(**json.loads(lines[-1]))
    except (IndexError, ValueError, TypeError):
        output = (process.stdout + process.stderr)[-6000:]
        raise ReproductionFailed(
            f"{module} ended with exit code {process.returncode} and no result\n{output}"
        ) from None


def print_outcome(outcome: Mapping[str, Any], *, as_json: bool) -> int:
    """Print a reproduction's result, and return its exit code: 0 where all is well.

    Args:
        outcome: the keys of :class:`Outcome`.
        as_json: as the last line, for :func:`reproduce`, which judges the requirements itself;
            else for a reader.
    """
    if as_json:
        print(json.dumps(outcome), flush=True)
        return 1 if outcome["faults"] else 0
    print(outcome["text"])
    for fault in outcome["faults"]:
        print(f"FAULT: {fault}")
    unmet = Outcome(**outcome).unmet
    for requirement in unmet:
        print(f"NOT {requirement}")
    return 1 if outcome["faults"] or unmet else 0
