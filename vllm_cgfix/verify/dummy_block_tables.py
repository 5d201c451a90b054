"""Reproduction for the fix ``dummy-block-tables``.

``python -m vllm_cgfix.verify.dummy_block_tables``

A hybrid model writes its recurrent state through the block table. Where the bug is, a dummy batch
has rows that real batches have left behind: of requests that have moved or finished, in the V1
runner, and of the last real batch, in the V2 runner. This runs the real V1 runner on a CPU, and
the method that hands out the V2 runner's tables.

Exit code 0: no fault, and what must hold with the fix holds. 1: otherwise.
"""

from __future__ import annotations

import importlib
import sys

import torch
from packaging.version import InvalidVersion, Version

from . import cpu, idle_batches
from .idle_batches import IdleBatch, Scenario
from .importers import has_module

STAGED_FROM = "0.23.0"
"""The release from which on a FULL dummy batch can be planned as its graph was for the capture."""

SCENARIOS = (
    Scenario("decode graphs", last_steps=("prefill", "condensing decode")),
    Scenario("two KV cache groups", kv_cache_groups=2, last_steps=("condensing decode",)),
)


def stale_rows(batch: IdleBatch) -> str | None:
    """Blocks in rows of a dummy batch beyond those of live requests; these have the first rows."""
    for plan in batch.forward.plans:
        rows = [row for row in plan.block_table[batch.live_reqs :] if any(row)]
        if rows:
            return f"block-table rows past the {batch.live_reqs} live: {rows}"
    plans = batch.forward.plans if batch.forward.mode == "FULL" and _staged() else []
    if not all(plan.for_capture for plan in plans):
        return "the buffers of the FULL graph keep what real batches staged there"
    return None


def _staged() -> bool:
    try:
        return Version(cpu.vllm_version()) >= Version(STAGED_FROM)
    except InvalidVersion:
        return False


def null_block(batch: IdleBatch) -> str | None:
    """Every row, those of live requests as well."""
    rows = [row for plan in batch.forward.plans for row in plan.block_table if any(row)]
    return f"block-table rows {rows}" if rows else None


def stale_v2_tables() -> list[str]:
    """What the V2 runner hands out as the block tables of a dummy batch after a real one."""
    if not has_module("vllm.v1.worker.gpu.block_table"):
        return []
    kind = importlib.import_module("vllm.v1.worker.gpu.block_table").BlockTables
    tables = object.__new__(kind)
    tables.input_block_tables = [torch.full((8, 4), 7, dtype=torch.int32) for _ in range(2)]
    tables._num_dirty_rows = 8  # from 0.33
    stale = [table for table in tables.get_dummy_block_tables(3) if table.any()]
    return [f"V2 runner: {len(stale)} block tables of the last real batch"] if stale else []


if __name__ == "__main__":
    sys.exit(
        idle_batches.main(
            __doc__,
            stale_rows,
            {"every block-table row of a dummy batch is the null block": null_block},
            scenarios=SCENARIOS,
            elsewhere=stale_v2_tables,
        )
    )
