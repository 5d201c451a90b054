"""The catalogue: one module a fix.

To add a fix:

1. write a module here with a ``FIX``, import it below and put it into ``CATALOGUE``
   (``v1_dummy_run`` has what fixes of the V1 runner's dummy batches share);
2. run ``python -m tests.releases.table``, which fetches the wheels and writes the hashes of its
   files into ``releases.json``;
3. write its reproduction, ``vllm_cgfix/verify/<id>.py`` with ``_`` for ``-`` (see there), which
   ``tests/releases/test_rows.py`` then runs on every release (``verify/idle_batches.py`` has what
   reproductions on dummy batches share);
4. write an independent textual patch, ``tests/releases/patches/<id>.py``, for the mutation test;
5. put the output of ``vllm-cgfix list --markdown`` into the README, with a section on the fix.
"""

from __future__ import annotations

from ..fix import Fix
from . import (
    dispatch_order,
    draft_dummy_slots,
    dummy_block_tables,
    dummy_lengths,
    dummy_query_start,
    dummy_seq_clamp,
    dummy_slots,
    dummy_sync,
    skip_attention,
    sleeping_dummy,
)

CATALOGUE: tuple[Fix, ...] = (
    dispatch_order.FIX,
    skip_attention.FIX,
    dummy_slots.FIX,
    dummy_sync.FIX,
    dummy_block_tables.FIX,
    sleeping_dummy.FIX,
    dummy_query_start.FIX,
    dummy_seq_clamp.FIX,
    dummy_lengths.FIX,
    draft_dummy_slots.FIX,
)
"""Every fix, in the order in which edits of one file are made.

The places of an edit must be found after the edits of those before it.
"""


def by_id(fix_id: str) -> Fix:
    """The fix of that id.

    Raises:
        KeyError: there is none.
    """
    return {fix.id: fix for fix in CATALOGUE}[fix_id]
