"""Stock against plugin on one GPU, in fresh processes, in alternation: one table.

Each process is alone on the GPU. Before the pairs of a model size, one stock and one plugin
process fill vLLM's compile caches, so that start-up compares warm starts.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tabulate import tabulate

from tests.gpu import machine, plan
from tests.gpu.children import OUT, Child, Result, run

SIDES = ("stock", "plugin")
RELEASES = (plan.V1, plan.V2_OPT_IN, plan.V2)
"""Those that need one of the two fixes whose cost or gain is on the path of every start or step."""
Measured = Mapping[str, float]


def child(side: str, layers: int, caches: Path, *, only_start: bool = False) -> Child:
    """One process of the benchmark."""
    release = machine.vllm_version()
    runner = "V1" if release == plan.V1 else "V2"
    fix = plan.DISPATCH if runner == "V1" else plan.SKIP
    environ = {"VLLM_CACHE_ROOT": str(caches / f"{side}-{layers}"), "OMP_NUM_THREADS": "8"}
    if release == plan.V2_OPT_IN:
        environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"
    return Child(
        f"{layers} layers/{side}",
        "tests.bench.gpu.engine_run",
        (
            *("--layers", str(layers), "--runner", runner),
            *(["--only-start"] if only_start else []),
        ),
        fix if side == "plugin" else None,
        timeout=300,
        environ=environ,
    )


def rows(layers: int, pairs: Sequence[Mapping[str, Measured]]) -> list[list[str]]:
    """The lines of the table for one model size.

    Args:
        layers: of the model.
        pairs: ``{"stock": measured, "plugin": measured}`` for each pair; a side that failed is
            missing.
    """
    table = []
    values = {side: [pair[side] for pair in pairs if pair.get(side)] for side in SIDES}
    names = list(dict.fromkeys(name for side in SIDES for found in values[side] for name in found))
    for name in names:
        medians, cells = {}, []
        for side in SIDES:
            found = [measured[name] for measured in values[side] if name in measured]
            if not found:
                cells.append("none")
                continue
            medians[side] = statistics.median(found)
            cells.append(f"{medians[side]:.4g} ({min(found):.4g}-{max(found):.4g})")
        ratio = "none"
        if len(medians) == 2 and medians["stock"]:
            ratio = f"{medians['plugin'] / medians['stock']:.3f}"
        table.append([str(layers), name, *cells, ratio])
    return table


def show(results: Mapping[int, Sequence[Mapping[str, Measured]]]) -> str:
    """The table, with the machine, the release and the date."""
    about = machine.describe()
    counts = ", ".join(f"{layers} layers: {len(pairs)} pairs" for layers, pairs in results.items())
    title = (
        f"vLLM {about['vllm']}, {about['gpu']}, Python {about['python']}, "
        f"{datetime.date.today()}; medians (lowest-highest) of {counts}"
    )
    lines = [row for layers, pairs in results.items() for row in rows(layers, pairs)]
    headers = ("layers", "what", "stock", "plugin", "plugin / stock")
    return (
        f"{title}\n\n{tabulate(lines, headers=headers, tablefmt='github', disable_numparse=True)}"
    )


def warm_up(layers: int, caches: Path, folder: Path) -> list[Result]:
    """Fill the compile caches of both sides, at the same time."""
    with ThreadPoolExecutor(2) as pool:
        waiting = [
            pool.submit(
                run,
                child(side, layers, caches, only_start=True),
                folder / f"warm-{layers}-{side}",
                index,
                shared=True,
            )
            for index, side in enumerate(SIDES)
        ]
        return [result.result() for result in waiting]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the pairs; 1 if a process failed, 2 if there is nothing to run on."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.gpu", description=__doc__)
    parser.add_argument("--layers", type=int, nargs="+", default=[16, 48])
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="16 layers, 2 pairs: about 4 minutes")
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="start no further pair after these"
    )
    options = parser.parse_args(arguments)
    if options.quick:
        options.layers, options.pairs = [16], 2
    reason = machine.why_not(*RELEASES)
    if reason is not None:
        print(f"nothing to measure: {reason}", file=sys.stderr)
        return 2
    begin = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="cgfix-bench-"))
    out = Path(os.environ.get(OUT) or folder)
    out.mkdir(parents=True, exist_ok=True)
    results: dict[int, list[dict[str, Measured]]] = {}
    failed: list[str] = []
    for layers in options.layers:
        if time.monotonic() - begin > options.seconds:
            break
        for result in warm_up(layers, folder / "caches", folder):
            print(f"warm-up, {result.name}: {result.status}, {result.seconds:.0f} s", flush=True)
            failed += [] if result.ok else [result.why()]
        for number in range(options.pairs):
            if time.monotonic() - begin > options.seconds:
                break
            pair: dict[str, Measured] = {}
            # Each side is first in turn: neither has the cooler GPU every time.
            for side in SIDES if number % 2 == 0 else SIDES[::-1]:
                result = run(
                    child(side, layers, folder / "caches"), folder / f"{layers}-{number}-{side}"
                )
                print(f"{result.name}: {result.status}, {result.seconds:.0f} s", flush=True)
                failed += [] if result.ok else [result.why() + "\n" + result.tail[-2000:]]
                pair[side] = result.report.get("measured", {})
            results.setdefault(layers, []).append(pair)
            name = f"bench-{machine.vllm_version()}"
            (out / f"{name}.json").write_text(json.dumps(results, indent=1))
            (out / f"{name}.txt").write_text(show(results) + "\n")
    shutil.rmtree(folder / "caches", ignore_errors=True)
    print("\n".join(failed))
    if results:
        print(f"\n{show(results)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
