"""Reproduction for the fix ``dummy-sync``: ``python -m vllm_cgfix.verify.dummy_sync``.

With async scheduling the copies of one step may still read the pinned input buffers while the
next is prepared; ``synchronize_input_prep`` waits for them. Where the bug is, an idle batch writes
those buffers without it. This runs the real V1 runner on a CPU, with an event that keeps a log.

Exit code 0: no fault, and what must hold with the fix holds. 1: otherwise.
"""

from __future__ import annotations

import sys

from . import idle_batches
from .idle_batches import IdleBatch, Scenario

SCENARIOS = (Scenario("decode graphs", last_steps=("prefill", "decode")),)


def unprotected_writes(batch: IdleBatch) -> str | None:
    """A write outside of the event; an idle batch without metadata writes nothing."""
    return idle_batches.unprotected(batch.forward.events) if batch.forward.plans else None


def one_wait(batch: IdleBatch) -> str | None:
    """Waiting twice would be a wait for this batch's own copies."""
    waits = [event for event in batch.forward.events if event in ("synchronize", "record")]
    none_needed = not waits and not batch.forward.plans
    return None if none_needed or waits == ["synchronize", "record"] else f"events {waits}"


if __name__ == "__main__":
    requirements = {"an idle batch waits once, and records once": one_wait}
    sys.exit(idle_batches.main(__doc__, unprotected_writes, requirements, scenarios=SCENARIOS))
