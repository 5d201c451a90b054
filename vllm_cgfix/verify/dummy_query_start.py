"""Reproduction for the fix ``dummy-query-start``.

``python -m vllm_cgfix.verify.dummy_query_start``

Beside a busy rank an idle batch of one request is padded to that rank's size. Where the bug is,
``query_start_loc`` past the request keeps what the last real step left there: a query of a padding
request is then negative, or as long as a prompt. This runs the real V1 runner on a CPU.

Exit code 0: no fault, and what must hold with the fix holds. 1: otherwise.
"""

from __future__ import annotations

import sys

from . import idle_batches
from .idle_batches import IdleBatch, Scenario, shortened

SCENARIOS = (Scenario("decode graphs", last_steps=("prefill", "decode", "condensing decode")),)


def stale_query_starts(batch: IdleBatch) -> str | None:
    """Query starts, on either side, that are not those of one token and empty requests."""
    for plan in batch.forward.plans:
        for side, starts in (("gpu", plan.query_start_loc), ("cpu", plan.query_start_loc_cpu)):
            if starts != [0] + [1] * (len(starts) - 1):
                return f"query_start_loc ({side}) is {shortened(starts)}"
    return None


if __name__ == "__main__":
    sys.exit(idle_batches.main(__doc__, stale_query_starts, {}, scenarios=SCENARIOS))
