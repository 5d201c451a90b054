"""``dummy-slots`` as a change of the text of ``_dummy_run``."""

from __future__ import annotations

from tests.releases.text import InsertAtTop, InsertText, Operation


def _dummy_run(before: int) -> tuple[Operation, ...]:
    """The line that sets the metadata to None, or from 0.15.0 on the first that asks for slots."""
    return (
        InsertAtTop("from vllm_cgfix.fixes.v1_dummy_run import pad_slots"),
        InsertText("pad_slots(self.input_batch.block_table)", before=before),
    )


PATCHES = {
    "GPUModelRunner._dummy_run": {
        ("0.12.0",): _dummy_run(129),
        ("0.13.0",): _dummy_run(132),
        ("0.14.0", "0.14.1"): _dummy_run(146),
        ("0.15.0", "0.15.1"): _dummy_run(149),
        ("0.16.0",): _dummy_run(153),
        ("0.17.0", "0.17.1"): _dummy_run(153),
        ("0.18.0", "0.18.1"): _dummy_run(157),
        ("0.19.0", "0.19.1"): _dummy_run(157),
    }
}
