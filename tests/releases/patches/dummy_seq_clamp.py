"""``dummy-seq-clamp`` as a change of the text of ``_dummy_run``."""

from __future__ import annotations

from tests.releases.text import InsertText, Operation


def _array(copy: int) -> tuple[Operation, ...]:
    """The line that copies the lengths to the device; they are an array of NumPy."""
    clamp = "np.minimum(self.seq_lens.np, self.max_model_len, out=self.seq_lens.np)"
    return (InsertText(clamp, before=copy),)


def _tensor(copy: int) -> tuple[Operation, ...]:
    """The line that copies the lengths to the device; they are a tensor."""
    return (InsertText("self.optimistic_seq_lens_cpu.clamp_(max=self.max_model_len)", before=copy),)


PATCHES = {
    "GPUModelRunner._dummy_run": {
        ("0.11.0",): _array(141),
        ("0.11.1", "0.11.2"): _array(125),
        ("0.12.0",): _array(143),
        ("0.13.0",): _array(146),
        ("0.14.0", "0.14.1"): _array(160),
        ("0.15.0", "0.15.1"): _array(168),
        ("0.16.0",): _array(172),
        ("0.17.0", "0.17.1"): _array(177),
        ("0.18.0", "0.18.1"): _array(183),
        ("0.19.0", "0.19.1"): _tensor(186),
        ("0.20.0", "0.20.1", "0.20.2"): _tensor(192),
        ("0.21.0", "0.22.0", "0.22.1"): _tensor(192),
        ("0.23.0", "0.24.0", "0.25.0", "0.25.1"): _tensor(192),
        ("0.26.0",): _tensor(209),
        ("0.27.0", "0.27.1", "0.28.0", "0.29.0"): _tensor(210),
        ("0.30.0",): _tensor(210),
        ("0.31.0", "0.32.0", "0.33.0"): _tensor(215),
    }
}
