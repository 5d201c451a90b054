"""The catalogue: one module a fix.

To add a fix, write a module with a ``FIX``, import it here and put it into ``CATALOGUE``; write
its reproduction in :mod:`vllm_cgfix.verify`; then run ``python -m tests.releases.table`` for the
hashes of its files.
"""

from __future__ import annotations

from ..fix import Fix
from . import dispatch_order, skip_attention

CATALOGUE: tuple[Fix, ...] = (dispatch_order.FIX, skip_attention.FIX)
"""Every fix, in the order in which edits of one file are made."""


def by_id(fix_id: str) -> Fix:
    """The fix of that id.

    Raises:
        KeyError: there is none.
    """
    return {fix.id: fix for fix in CATALOGUE}[fix_id]
