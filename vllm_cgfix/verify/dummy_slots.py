"""Reproduction for the fix ``dummy-slots``: ``python -m vllm_cgfix.verify.dummy_slots``.

A dummy batch has no tokens of its own to keep, so that each of its slots must be -1: a kernel that
stores K/V then stores nothing. Where the bug is, an idle batch that replays a FULL graph, or from
0.15 on any idle batch, has the slots of the last real step. This runs the real V1 runner on a CPU.

Exit code 0: no fault, and what must hold with the fix holds. 1: otherwise.
"""

from __future__ import annotations

import sys

from . import idle_batches
from .idle_batches import IdleBatch, Scenario, shortened

SCENARIOS = (
    Scenario("decode graphs", last_steps=("prefill", "decode")),
    Scenario("piecewise graphs", mode="PIECEWISE"),
)


def written_slots(batch: IdleBatch) -> str | None:
    """The slots at which the pass of an idle batch stores K/V.

    A FULL graph reads the persistent buffers, over all tokens for which it was captured. Without
    metadata nothing is read but what the forward context has.
    """
    forward = batch.forward
    read = [*forward.context_slot_mapping, *(plan.slot_mapping for plan in forward.plans)]
    if forward.plans and forward.descriptor is not None:
        read += [slots[: forward.descriptor["num_tokens"]] for slots in forward.slot_mapping]
    written = sorted({slot for slots in read for slot in slots if slot != -1})
    return f"K/V is written to the slots {shortened(written)}" if written else None


if __name__ == "__main__":
    sys.exit(idle_batches.main(__doc__, written_slots, {}, scenarios=SCENARIOS))
