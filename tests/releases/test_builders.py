"""What every metadata builder of 0.11.x plans for an idle batch beside a busy rank."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_cgfix.fixes import dispatch_order

from .process import environment

SCRIPT = Path(__file__).with_name("builders.py")
# FlashInfer's MLA builder came with 0.11.1.
BUILDERS = {"0.11.0": 12, "0.11.1": 13, "0.11.2": 13}


def observe(release: str, padded_to: int, setting: str) -> dict[str, dict]:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(padded_to)],
        env=environment(release, VLLM_CGFIX=setting),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.rstrip().splitlines()[-1])
    return {name: plan for name, plan in found.items() if "error" not in plan}


@pytest.mark.parametrize("padded_to", [8, 64])
@pytest.mark.parametrize("release", dispatch_order.FIX.releases)
def test_every_builder_plans_the_size_that_is_replayed(release, padded_to):
    found = observe(release, padded_to, "dispatch-order")
    assert len(found) == BUILDERS[release], found
    for builder, plan in found.items():
        assert plan["idle"] == plan["captured"], builder


def test_without_the_plugin_there_is_no_plan():
    found = observe("0.11.2", 8, "off")
    assert len(found) == BUILDERS["0.11.2"]
    assert [builder for builder, plan in found.items() if plan["idle"] is not None] == []
