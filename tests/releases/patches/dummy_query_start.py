"""``dummy-query-start`` as a change of the text of ``_dummy_run``."""

from __future__ import annotations

from tests.releases.text import InsertText, Operation

_PADDING = "self.query_start_loc.np[num_reqs + 1 : num_reqs_padded + 1] = cum_num_tokens[-1]"


def _dummy_run(starts: int) -> tuple[Operation, ...]:
    """The line that writes the query starts."""
    return (InsertText(_PADDING, before=starts),)


PATCHES = {
    "GPUModelRunner._dummy_run": {
        ("0.12.0",): _dummy_run(146),
        ("0.13.0",): _dummy_run(149),
        ("0.14.0", "0.14.1"): _dummy_run(163),
        ("0.15.0", "0.15.1"): _dummy_run(171),
        ("0.16.0",): _dummy_run(175),
        ("0.17.0", "0.17.1"): _dummy_run(180),
        ("0.18.0", "0.18.1"): _dummy_run(186),
        ("0.19.0", "0.19.1"): _dummy_run(191),
        ("0.20.0", "0.20.1", "0.20.2"): _dummy_run(197),
        ("0.21.0", "0.22.0", "0.22.1"): _dummy_run(197),
    }
}
