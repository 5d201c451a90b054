"""Every row of the table, proved: fix by fix, release by release, on that release's own sources.

Where a release needs a fix: the fault shows without the plugin, and is gone with it, and what the
fix must keep is kept. Where it does not: the fault does not show without the plugin.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import runpy
import sys
from typing import Any

import pytest

from vllm_cgfix.decision import Decider, ReleaseTable
from vllm_cgfix.fix import Fix, State
from vllm_cgfix.fixes import CATALOGUE
from vllm_cgfix.installation import Installation
from vllm_cgfix.verify import Outcome, reproduce, reproduction_of

from .process import environment
from .scenarios import ForkServer, server_of_each
from .sources import RELEASES, source_dir


def import_vllm() -> None:
    """Import what the reproductions need of a release, once for all of them."""
    from vllm_cgfix.verify import cpu

    cpu.use_cpu_platform()
    for name in ("engine.core", "engine.core_client", "worker.cpu_model_runner"):
        importlib.import_module(f"vllm.v1.{name}")
    importlib.import_module("vllm.v1.worker.gpu_worker")


def run_reproduction(module: str) -> Any:
    """What a reproduction prints, in this process."""
    sys.argv = [module, "--json"]
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.suppress(SystemExit):
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    return json.loads(output.getvalue())


server = server_of_each(RELEASES, import_vllm)


def outcome(server: ForkServer, fix: Fix, setting: str) -> Outcome:
    ended = server.run(run_reproduction, reproduction_of(fix), VLLM_CGFIX=setting)
    return Outcome(**ended.value)


def unaffected(outcome):
    """The passes of a capture that no fix is for: they must be those of stock vLLM."""
    passes = outcome.observations.get("passes", [])
    return [found for found in passes if found["mode"] == "FULL" or found["breakable"]]


@pytest.mark.parametrize("fix", CATALOGUE, ids=lambda fix: fix.id)
def test_row(fix, server, record_property):
    release, process = server
    needed = release in fix.releases
    record_property("row", f"{release} {fix.id}")
    decided = Decider(Installation(str(source_dir(release) / "vllm")), ReleaseTable.load())
    expected = State.PENDING if needed else State.NOT_NEEDED
    assert decided.decide(fix).state is expected

    stock = outcome(process, fix, "off")
    assert stock.vllm == release
    assert stock.status.get(fix.id) in (None, "off")
    assert bool(stock.faults) is needed, stock.faults

    if needed:
        fixed = outcome(process, fix, fix.id)
        assert fixed.status[fix.id] == "applied"
        assert fixed.faults == []
        assert fixed.requirements, "a reproduction without requirements proves half of it"
        assert fixed.unmet == []
        assert unaffected(fixed) == unaffected(stock)


@pytest.mark.parametrize("release", [min, max], ids=["oldest", "newest"])
@pytest.mark.parametrize("fix", CATALOGUE, ids=lambda fix: fix.id)
def test_fresh_process(fix, release):
    """As users run it, where the plugin comes before the modules that it edits."""
    release = release(fix.releases, key=RELEASES.index)
    fixed = reproduce(fix, with_plugin=True, environ=environment(release))
    assert (fixed.vllm, fixed.status[fix.id]) == (release, "applied")
    assert fixed.faults == []
    assert fixed.unmet == []
