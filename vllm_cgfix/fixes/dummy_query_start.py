"""``dummy-query-start``: a padded dummy batch of the V1 runner has query starts that fit it.

Beside a busy rank a dummy batch is padded to that rank's size. ``_dummy_run`` of 0.12.0 to 0.22.1
writes ``query_start_loc`` for its own requests only; past them are the values of the last real
batch, which the metadata of the padded batch includes: the first padding request seems to have a
query as long as that batch, or a negative one. Found by running it; upstream fills them from
0.23.0 on, in no pull request that is known here.
"""

from __future__ import annotations

from ..code_edit import EditFunction, Insert
from ..fix import Fix
from .v1_dummy_run import MODULE, QUALNAME

FIX = Fix(
    id="dummy-query-start",
    title="the query starts of a padded dummy batch of the V1 runner end at its tokens",
    symptom=(
        "wrong or hanging attention in the dummy batch of an idle data-parallel rank beside a "
        "busy one: query_start_loc keeps values of the last real batch"
    ),
    error_patterns=(
        r"execute_dummy_batch",
        r"query_start_loc|cu_seqlens|qo_indptr",
        r"\b(hangs?|hung|stuck|timed? ?out)\b.*\b(data.parallel|dp|dummy|idle|rank)",
        r"\b(data.parallel|dp|dummy|idle|rank)\b.*\b(hangs?|hung|stuck|timed? ?out)\b",
    ),
    upstream=("as in 0.23.0",),
    scope="V1 runner",
    releases=(
        *("0.12.0", "0.13.0", "0.14.0", "0.14.1", "0.15.0", "0.15.1", "0.16.0", "0.17.0"),
        *("0.17.1", "0.18.0", "0.18.1", "0.19.0", "0.19.1", "0.20.0", "0.20.1", "0.20.2"),
        *("0.21.0", "0.22.0", "0.22.1"),
    ),
    edits={
        MODULE: (
            EditFunction(
                QUALNAME,
                (
                    Insert(
                        "self.query_start_loc.np[num_reqs + 1 : num_reqs_padded + 1] = "
                        "cum_num_tokens[-1]",
                        before=(
                            "self.query_start_loc.np[1 : num_reqs + 1] = cum_num_tokens\n"
                            "self.query_start_loc.copy_to_gpu()"
                        ),
                    ),
                ),
            ),
        ),
    },
    witnesses=("vllm/v1/utils.py",),
)
