"""What all reproductions share: a command line, an outcome, requirements and a table of them."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import vllm_cgfix

from . import cpu, print_outcome


def run(
    description: str | None,
    reproduce: Callable[..., dict[str, Any]],
    *,
    flags: Mapping[str, str] | None = None,
) -> int:
    """Reproduce as the command line asks, print what was seen, and return the exit code.

    Args:
        description: of the reproduction; its first line is shown.
        reproduce: returns the keys of :class:`vllm_cgfix.verify.Outcome`.
        flags: name to help of the switches that ``reproduce`` takes as keyword arguments.
    """
    parser = argparse.ArgumentParser(description=(description or "").partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="the result as one line of JSON")
    for name, text in (flags or {}).items():
        parser.add_argument(f"--{name}", action="store_true", help=text)
    options = vars(parser.parse_args())
    as_json = options.pop("json")
    # The result is alone on stdout, whatever vLLM prints.
    with contextlib.redirect_stdout(sys.stderr):
        outcome = reproduce(**options)
    return print_outcome(outcome, as_json=as_json)


def outcome(
    faults: Sequence[str],
    requirements: Sequence[dict[str, Any]],
    observations: dict[str, Any],
    text: str,
) -> dict[str, Any]:
    """The keys of :class:`vllm_cgfix.verify.Outcome`, for what has run in this process."""
    return {
        "vllm": cpu.vllm_version(),
        "faults": [*faults],
        "requirements": [*requirements],
        "observations": observations,
        "status": {status.fix.id: status.state.value for status in vllm_cgfix.status()},
        "text": text,
    }


def requirement(name: str, wrong: Sequence[str], detail: str = "") -> dict[str, Any]:
    """A requirement that holds if nothing is wrong.

    Args:
        name: of the requirement.
        wrong: sentences on what is wrong.
        detail: what is said where nothing is.
    """
    return {"name": name, "ok": not wrong, "detail": "; ".join(wrong) or detail}


def columns(
    rows: Sequence[Sequence[str]], requirements: Sequence[dict[str, Any]], explanation: str = ""
) -> str:
    """Rows in columns, the first of them the headings; then a line for each requirement.

    Args:
        rows: nothing of them is shown where there are only the headings.
        requirements: each as :func:`requirement` makes it.
        explanation: a line before all.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [explanation] if explanation else []
    if len(rows) > 1:
        lines += ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    for found in requirements:
        mark = "ok" if found["ok"] else "NOT"
        lines.append(f"{mark:<3} {found['name']}: {found['detail']}")
    return "\n".join(lines)
