"""``draft-dummy-slots`` as changes of the text of the drafter's steps."""

from __future__ import annotations

from dataclasses import dataclass

from tests.releases.text import ExtendCall, InsertText, Line, Operation

_0_21_AND_0_22 = ("0.21.0", "0.22.0", "0.22.1")
_0_25_AND_0_26 = ("0.25.0", "0.25.1", "0.26.0")
_0_27 = ("0.27.0", "0.27.1")


@dataclass(frozen=True)
class _InsertBehind:
    """Insert text of our own behind a statement, which begins and ends in these lines."""

    text: str
    first: int
    last: int

    def anchors(self) -> tuple[int, ...]:
        return (self.first,)  # Both may have become one line.

    def apply(self, lines: list[Line]) -> list[Line]:
        return InsertText(self.text, after=self.last).apply(lines)


def _decode(parameters: int, slots: tuple[int, int]) -> tuple[Operation, ...]:
    """The end of the parameters, and the statement that computes the slots."""
    return (
        InsertText("dummy_run=False,", before=parameters),
        _InsertBehind("if dummy_run:\n    slot_mappings.fill_(-1)", *slots),
    )


def _propose(call: tuple[int, int], decode: str) -> tuple[Operation, ...]:
    """The call of the later steps, whatever parentheses there are around the method."""
    return (ExtendCall(*call, rf"{decode}\)?", "dummy_run=dummy_run"),)


PATCHES = {
    "EagleSpeculator.multi_step_decode": {_0_21_AND_0_22: _decode(7, (20, 25))},
    "EagleSpeculator.propose": {_0_21_AND_0_22: _propose((134, 139), "multi_step_decode")},
    "AutoRegressiveSpeculator._multi_step_decode": {
        ("0.23.0", "0.24.0", *_0_25_AND_0_26): _decode(7, (18, 23)),
        _0_27: _decode(8, (19, 24)),
    },
    "AutoRegressiveSpeculator.propose": {
        ("0.23.0", "0.24.0"): _propose((136, 141), "_multi_step_decode"),
        _0_25_AND_0_26: _propose((138, 143), "_multi_step_decode"),
        _0_27: _propose((138, 144), "_multi_step_decode"),
    },
}
