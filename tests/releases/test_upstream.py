"""vLLM's own tests on its own stock sources: what passes without the plugin passes with it.

The tests of CUDA graphs and of the worker, out of the source distribution, once without the plugin
and once with it loaded before anything that it edits. Tests that need a GPU or the network are
skipped or fail in both.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import vllm_cgfix
from tests.needs import modules, needed, states_with_all

from .process import environment
from .sdist import upstream_tests

SCRIPT = Path(__file__).with_name("upstream_run.py")
TESTS = ("tests/v1/cudagraph", "tests/v1/worker")
# Left out: every test in it starts an engine on a GPU, with a model from the network, and takes
# 13 s of CPU to find neither.
LEFT_OUT = "tests/v1/cudagraph/test_cudagraph_mode.py"
# Far fewer than pass: something that they import is missing, and nothing would be compared.
AT_LEAST = {"0.27.1": 150, "0.33.0": 700}
CATEGORIES = ("passed", "failed", "skipped", "error")
EDITED = {
    "vllm.forward_context",
    "vllm.model_executor.layers.attention.attention",
    "vllm.v1.worker.gpu.cudagraph_utils",
    "vllm.v1.worker.gpu_model_runner",
}


def run(release: str, report: Path, *tests: str, with_plugin: bool) -> tuple[dict[str, Any], float]:
    """Run vLLM's tests; the report of ``upstream_run.py``, and the seconds it took."""
    env = {
        name: value
        for name, value in environment(release).items()
        if not name.startswith("PYTEST_")  # those of the run that this test is part of
    }
    # Last: a checkout of this project has a package called tests, too.
    env["PYTHONPATH"] += os.pathsep + str(Path(vllm_cgfix.__file__).parents[1])
    if with_plugin:
        env["VLLM_CGFIX"] = "1"
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(report), *tests],
        cwd=upstream_tests(release),
        env=env,
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert done.returncode == 0, f"{done.stdout[-5000:]}\n{done.stderr[-5000:]}"
    return json.loads(report.read_text("utf-8")), time.monotonic() - started


def lost(without: dict[str, Any], with_plugin: dict[str, Any]) -> dict[str, str]:
    """The tests that pass in the first report and not in the second, with what they are there."""
    found = with_plugin["outcomes"]
    return {
        test: found.get(test, "not run")
        for test, outcome in without["outcomes"].items()
        if outcome == "passed" and found.get(test) != "passed"
    }


def summary(report: dict[str, Any], seconds: float) -> str:
    """The counts, as pytest words them."""
    counts = Counter(report["outcomes"].values())
    return ", ".join(f"{counts[c]} {c}" for c in CATEGORIES) + f" in {seconds:.0f} s"


@pytest.mark.parametrize("release", AT_LEAST)
def test_nothing_is_lost(release, tmp_path, record_property):
    tests = (*TESTS, f"--ignore={LEFT_OUT}")
    stock, stock_seconds = run(release, tmp_path / "stock.json", *tests, with_plugin=False)
    fixed, fixed_seconds = run(release, tmp_path / "fixed.json", *tests, with_plugin=True)
    lines = [
        f"vLLM {release}, its own {' and '.join(TESTS)}",
        f"  without the plugin: {summary(stock, stock_seconds)}",
        f"  with the plugin:    {summary(fixed, fixed_seconds)}",
        f"  left out: {LEFT_OUT} (needs a GPU and the network)",
    ]
    missing = lost(stock, fixed)
    if missing:
        # A test that hangs on the clock may fail once; one that the plugin breaks fails again.
        stock_again, _ = run(release, tmp_path / "stock2.json", *missing, with_plugin=False)
        fixed_again, _ = run(release, tmp_path / "fixed2.json", *missing, with_plugin=True)
        lines += [f"  run again in both: {test} ({how})" for test, how in missing.items()]
        missing = lost(stock_again, fixed_again)
        lines += [f"  lost again: {test} ({how})" for test, how in missing.items()]
        fixed["details"].update(fixed_again["details"])
    text = "\n".join(lines)
    print(text)
    record_property("upstream", text)

    assert set(stock["status"].values()) <= {"off"}
    assert fixed["imported_early"] == []
    fixes = needed(release)
    # Not all that is edited is imported by these tests.
    applied = {fix.id for fix in fixes if fixed["status"][fix.id] == "applied"}
    expected = states_with_all(release, "pending") | dict.fromkeys(applied, "applied")
    assert fixed["status"] == expected
    assert {*modules(fixes)} >= EDITED
    for fix in fixes:
        assert {*fixed["edited"][fix.id]} >= EDITED & {*fix.edits}, fix
    assert Counter(stock["outcomes"].values())["passed"] >= AT_LEAST[release]
    assert not missing, "\n\n".join(
        f"{test}: {how}\n{fixed['details'].get(test, '')}" for test, how in missing.items()
    )
