"""Every row of the table, proved: fix by fix, release by release, on that release's own sources.

Where a release needs a fix: the fault shows without the plugin, and is gone with it, and what the
fix must keep is kept. Where it does not: the fault does not show without the plugin.
"""

from __future__ import annotations

import pytest

from vllm_cgfix.decision import Decider, ReleaseTable
from vllm_cgfix.fix import State
from vllm_cgfix.fixes import CATALOGUE
from vllm_cgfix.installation import Installation
from vllm_cgfix.verify import reproduce

from .process import environment
from .sources import RELEASES, source_dir

ROWS = [
    # Release by release: what pip has to fetch for the next one is fetched while one runs.
    pytest.param(fix, release, id=f"{release}-{fix.id}")
    for release in RELEASES
    for fix in CATALOGUE
]


def unaffected(outcome):
    """The passes of a capture that no fix is for: they must be those of stock vLLM."""
    passes = outcome.observations.get("passes", [])
    return [found for found in passes if found["mode"] == "FULL" or found["breakable"]]


@pytest.mark.parametrize(("fix", "release"), ROWS)
def test_row(fix, release, record_property):
    needed = release in fix.releases
    record_property("row", f"{release} {fix.id}")
    decided = Decider(Installation(str(source_dir(release) / "vllm")), ReleaseTable.load())
    expected = State.PENDING if needed else State.NOT_NEEDED
    assert decided.decide(fix).state is expected

    stock = reproduce(fix, with_plugin=False, environ=environment(release))
    assert stock.vllm == release
    assert stock.status.get(fix.id) in (None, "off")
    assert bool(stock.faults) is needed, stock.faults

    if needed:
        fixed = reproduce(fix, with_plugin=True, environ=environment(release))
        assert fixed.status[fix.id] == "applied"
        assert fixed.faults == []
        assert fixed.requirements, "a reproduction without requirements proves half of it"
        assert fixed.unmet == []
        assert unaffected(fixed) == unaffected(stock)
