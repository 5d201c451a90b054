"""The catalogue: one module a fix.

To add a fix:

1. write a module here with a ``FIX``, import it below and put it into ``CATALOGUE``;
2. run ``python -m tests.releases.table``, which fetches the wheels and writes the hashes of its
   files into ``releases.json``;
3. write its reproduction, ``vllm_cgfix/verify/<id>.py`` with ``_`` for ``-`` (see there), which
   ``tests/releases/test_rows.py`` then runs on every release;
4. write an independent textual patch, ``tests/releases/patches/<id>.py``, for the mutation test;
5. put the output of ``vllm-cgfix list --markdown`` into the README, with a section on the fix.
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
