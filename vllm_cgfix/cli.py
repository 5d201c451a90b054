"""The command ``vllm-cgfix``: what this installation needs, would get, and whether it works."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import sys
from collections.abc import Sequence
from typing import Any

from tabulate import tabulate

from . import __version__, settings
from .decision import Decider, ReleaseTable
from .fix import Fix, FixStatus, State
from .fixes import CATALOGUE
from .installation import Distribution, Installation, NoVllm

_IDS = tuple(fix.id for fix in CATALOGUE)
EXIT_GOOD, EXIT_BAD, EXIT_NO_VLLM = 0, 1, 2
EXIT_USAGE = 2  # as argparse has it


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code.

    0: all is well. 1: a fix that is needed is refused, a reproduction shows a fault that the
    plugin should have removed, or a setting is not valid. 2: there is no vLLM here, or the
    command line is not valid.
    """
    parser = argparse.ArgumentParser(prog="vllm-cgfix", description=__doc__)
    parser.add_argument("--version", action="version", version=f"vllm-cgfix {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    status = commands.add_parser(
        "status",
        help="what the vLLM of this environment needs, and why; reads files only",
        description="Decide every fix for the vLLM of this environment, by the hashes of its "
        "files. Neither vLLM nor torch is imported. Exit code 0: all is well; 1: something that "
        "is needed is refused, or a setting is not valid; 2: there is no vLLM.",
    )
    status.add_argument("--json", action="store_true", help="print one JSON object")
    status.add_argument(
        "--error", metavar="TEXT", help="am I affected? only the fixes whose symptom matches TEXT"
    )
    status.set_defaults(run=_status)

    verify = commands.add_parser(
        "verify",
        help="show each fault on the vLLM of this environment, without and with the plugin",
        description="Run the reproduction of each fix in fresh processes, once with the plugin "
        "off and once with the fix on. Exit code 0: no fault is left with the plugin; 1: one is, "
        "or it could not be shown; 2: there is no vLLM, or no such fix.",
    )
    verify.add_argument("fix", nargs="*", metavar="FIX", help="default: all")
    verify.set_defaults(run=_verify)

    listing = commands.add_parser("list", help="the fixes, and the releases that need each")
    listing.add_argument("--markdown", action="store_true", help="as the README has it")
    listing.set_defaults(run=_list)

    parsed = parser.parse_args(arguments)
    code: int = parsed.run(parsed)
    return code


# --- status -----------------------------------------------------------------------------------


def _status(arguments: argparse.Namespace) -> int:
    fixes = CATALOGUE
    if arguments.error is not None:
        fixes = tuple(fix for fix in CATALOGUE if _explains(fix, arguments.error))
    try:
        chosen = settings.read(os.environ)
        ids = chosen.chosen(_IDS)
    except settings.SettingsError as error:
        print(f"vllm-cgfix: {error}", file=sys.stderr)
        return EXIT_BAD
    try:
        installation = Installation.find()
        table = ReleaseTable.load()
    except NoVllm as error:
        return _say_no_vllm(error, arguments.json)
    except (OSError, ValueError) as error:
        print(f"vllm-cgfix: releases.json of this installation: {error}", file=sys.stderr)
        return EXIT_BAD
    decider = Decider(installation, table)
    statuses = [decider.decide(fix, unverified=chosen.unverified) for fix in fixes]
    report = {
        "vllm_cgfix": __version__,
        "vllm": installation.version,
        "directory": installation.directory,
        "distributions": [vars(found) for found in installation.distributions(table.files)],
        "setting": os.environ.get(settings.FIXES, ""),
        "fixes": [_as_json(status, status.fix.id in ids) for status in statuses],
    }
    if arguments.json:
        print(json.dumps(report, indent=1))
    else:
        _print_report(report, statuses, arguments.error)
    return EXIT_BAD if any(s.state is State.REFUSED for s in statuses) else EXIT_GOOD


def _explains(fix: Fix, error: str) -> bool:
    flags = re.IGNORECASE | re.DOTALL  # a paste can have several lines
    return any(re.search(pattern, error, flags) for pattern in fix.error_patterns)


def _say_no_vllm(error: NoVllm, as_json: bool) -> int:
    if as_json:
        print(json.dumps({"vllm_cgfix": __version__, "vllm": None, "reason": str(error)}, indent=1))
    else:
        print(
            f"vllm-cgfix {__version__}: {error}.\n"
            "Run vllm-cgfix with the Python environment that runs vLLM: "
            "there, `python -m pip install vllm-cgfix`, then `vllm-cgfix status`."
        )
    return EXIT_NO_VLLM


def _as_json(status: FixStatus, chosen: bool) -> dict[str, Any]:
    return {
        "id": status.fix.id,
        "state": status.state.value,
        "chosen": chosen,
        "scope": status.fix.scope,
        "release": status.release,
        "reason": status.reason,
        "remedy": status.remedy,
        "notes": status.notes,
        "symptom": status.fix.symptom,
    }


def _print_report(report: dict[str, Any], statuses: list[FixStatus], error: str | None) -> None:
    print(f"vllm-cgfix {__version__}")
    print(f"vLLM {report['vllm'] or '(unknown version)'} in {report['directory']}")
    for found in report["distributions"]:
        distribution = Distribution(**found)
        # One that an earlier folder of sys.path shadows; an editable one has no files here.
        elsewhere = distribution.directory
        if not os.path.isdir(elsewhere) or os.path.samefile(elsewhere, report["directory"]):
            elsewhere = ""
        print(f"  from {distribution}" + (f" in {elsewhere}" if elsewhere else ""))
    if len(report["distributions"]) > 1:
        print("  several distributions provide vllm: the files in the folder above are what counts")
    elif not report["distributions"]:
        print("  no installed distribution claims it")
    if error is not None and not statuses:
        print(
            "No fix lists this text as its symptom. That does not show that you are not affected: "
            "`vllm-cgfix status` says what this vLLM needs."
        )
        return
    print()
    chosen = {fix["id"]: fix["chosen"] for fix in report["fixes"]}
    rows = [
        (
            status.fix.id,
            _meaning(status, chosen[status.fix.id], report["setting"]),
            status.fix.scope,
        )
        for status in statuses
    ]
    print(tabulate(rows, headers=("fix", "here", "concerns"), tablefmt="simple"))
    for status in statuses:
        if error is not None:
            print(f"\n{status.fix.id}: {status.fix.symptom}")
        if status.reason:
            print(f"\n{status.fix.id} is refused: {status.reason}")
        if status.remedy:
            print(f"  what you can do: {status.remedy}")
        for note in status.notes:
            print(f"\n{status.fix.id}: {note}")
    if report["setting"] and "cgfix" not in os.environ.get("VLLM_PLUGINS", "cgfix").split(","):
        print("\nVLLM_PLUGINS is set and does not list cgfix: vLLM will not load this plugin.")


def _meaning(status: FixStatus, chosen: bool, setting: str) -> str:
    """A state as it reads before vLLM has been started."""
    if status.state is not State.PENDING:
        return {State.NOT_NEEDED: "not needed", State.REFUSED: "refused"}[status.state]
    if chosen:
        return f"needed; applied, by {settings.FIXES}={setting}"
    if setting:
        return f"needed, but left out by {settings.FIXES}={setting}"
    return f"needed; not switched on ({settings.FIXES}=1)"


# --- verify -----------------------------------------------------------------------------------


def _verify(arguments: argparse.Namespace) -> int:
    unknown = set(arguments.fix) - set(_IDS)
    if unknown:
        print(
            f"vllm-cgfix: no fix {', '.join(sorted(unknown))}; there are {', '.join(_IDS)}",
            file=sys.stderr,
        )
        return EXIT_USAGE
    if importlib.util.find_spec("vllm") is None:
        return _say_no_vllm(NoVllm("no module named vllm is installed"), as_json=False)
    fixes = [fix for fix in CATALOGUE if not arguments.fix or fix.id in arguments.fix]
    results = [_verify_one(fix) for fix in fixes]
    return EXIT_GOOD if all(results) else EXIT_BAD


def _verify_one(fix: Fix) -> bool:
    """Show a fix's reproduction without and with the plugin; whether it is well with it."""
    from . import verify

    print(f"== {fix.id}: {fix.title}", flush=True)
    outcomes = []
    for with_plugin in (False, True):
        label = "with the plugin" if with_plugin else "stock"
        print(f"\n-- {label} (a fresh process, up to a minute) ...", flush=True)
        try:
            outcome = verify.reproduce(fix, with_plugin=with_plugin)
        except verify.ReproductionFailed as error:
            print(f"could not be verified here: {error}")
            return False
        outcomes.append(outcome)
        print(f"vLLM {outcome.vllm}; {fix.id} is {outcome.status.get(fix.id, 'off')}")
        print(outcome.text)
        for fault in outcome.faults:
            print(f"FAULT: {fault}")
    stock, fixed = outcomes
    # What the fix must keep is only to be held against it where it is in force.
    applied = fixed.status.get(fix.id) == State.APPLIED.value
    for unmet in fixed.unmet if applied else []:
        print(f"FAULT: {unmet}")
    good = not fixed.faults and not (applied and fixed.unmet)
    print(_verdict(fix, bool(stock.faults), good))
    return good


def _verdict(fix: Fix, shown: bool, good: bool) -> str:
    if not good:
        return f"=> {fix.id}: the fault is there with the plugin"
    if shown:
        return f"=> {fix.id}: the fault shows on stock vLLM and is gone with the plugin"
    return f"=> {fix.id}: this vLLM does not have the fault"


# --- list -------------------------------------------------------------------------------------


def _list(arguments: argparse.Namespace) -> int:
    releases = ReleaseTable.load().releases
    rows = [
        (
            f"`{fix.id}`" if arguments.markdown else fix.id,
            needed_on(fix, releases),
            fix.scope,
            fix.symptom,
            ", ".join(fix.upstream),
        )
        for fix in CATALOGUE
    ]
    headers = ("fix", "needed on", "concerns", "symptom", "upstream")
    if arguments.markdown:
        print(tabulate(rows, headers=headers, tablefmt="github"))
    else:
        widths = [None, 16, None, 50, 20]
        print(tabulate(rows, headers=headers, tablefmt="simple", maxcolwidths=widths))
    print(f"\nProved on the {len(releases)} releases from {releases[0]} to {releases[-1]}.")
    return EXIT_GOOD


def needed_on(fix: Fix, releases: tuple[str, ...]) -> str:
    """The releases that need a fix, as spans of the releases that there are.

    >>> needed_on(dispatch_order, ("0.10.2", "0.11.0", "0.11.1", "0.11.2", "0.12.0"))
    '0.11.0-0.11.2'
    """
    spans: list[list[str]] = []
    previous_needed = False
    for release in releases:
        needed = release in fix.releases
        if needed and previous_needed:
            spans[-1].append(release)
        elif needed:
            spans.append([release])
        previous_needed = needed
    return ", ".join(span[0] if len(span) == 1 else f"{span[0]}-{span[-1]}" for span in spans)


if __name__ == "__main__":
    sys.exit(main())
