"""``dummy-sync`` as a change of the text of ``_dummy_run``."""

from __future__ import annotations

from tests.releases.text import Operation, WrapLines


def _dummy_run(build: tuple[int, int], behind: tuple[int, int]) -> tuple[Operation, ...]:
    """The ``if`` that builds the metadata, and the statement right before it."""
    return (WrapLines(*build, "with self.synchronize_input_prep():", behind=behind),)


PATCHES = {
    "GPUModelRunner._dummy_run": {
        ("0.12.0",): _dummy_run((133, 155), behind=(129, 129)),
        ("0.13.0",): _dummy_run((136, 159), behind=(132, 132)),
        ("0.14.0", "0.14.1"): _dummy_run((150, 173), behind=(146, 146)),
        ("0.15.0", "0.15.1"): _dummy_run((158, 182), behind=(149, 154)),
        ("0.16.0",): _dummy_run((162, 186), behind=(153, 158)),
    }
}
