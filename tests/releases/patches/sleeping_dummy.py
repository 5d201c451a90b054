"""``sleeping-dummy`` as changes of the text of the busy loop and of ``wake_up``."""

from __future__ import annotations

from dataclasses import dataclass

from tests.releases.text import Line, Operation, WrapLines

_HEADER = "if not self.model_executor.is_sleeping:"


def _guard(first: int, last: int, behind: tuple[int, int]) -> tuple[Operation, ...]:
    """The statement in these lines, and the one right before it."""
    return (WrapLines(first, last, _HEADER, behind=behind),)


@dataclass(frozen=True)
class _GuardLoggedBatch:
    """The dummy batch in its ``with``, or without one, as the releases before have it."""

    logged: int
    batch: int
    behind: tuple[int, int]

    def anchors(self) -> tuple[int, ...]:
        return self.behind[0], self.batch

    def apply(self, lines: list[Line]) -> list[Line]:
        has_with = any(self.logged in line.stock for line in lines)
        first = self.logged if has_with else self.batch
        return WrapLines(first, self.batch, _HEADER, behind=self.behind).apply(lines)


PATCHES = {
    "DPEngineCoreProc.run_busy_loop": {
        ("0.10.2", "0.11.0"): _guard(21, 21, behind=(15, 17)),
        (
            *("0.11.1", "0.11.2", "0.12.0", "0.13.0", "0.14.0", "0.14.1", "0.15.0", "0.15.1"),
            "0.16.0",
        ): _guard(21, 21, behind=(15, 17)),
        ("0.17.0", "0.17.1"): _guard(26, 26, behind=(20, 22)),
        ("0.18.0", "0.18.1"): _guard(26, 26, behind=(20, 22)),
        ("0.19.0", "0.19.1", "0.20.0", "0.20.1", "0.20.2", "0.21.0"): _guard(
            28, 28, behind=(22, 24)
        ),
        ("0.22.0", "0.22.1"): _guard(30, 30, behind=(24, 26)),
        ("0.23.0",): (_GuardLoggedBatch(30, 31, behind=(24, 26)),),
    },
    "EngineCore.wake_up": {
        (
            *("0.17.0", "0.17.1", "0.18.0", "0.18.1", "0.19.0", "0.19.1", "0.20.0", "0.20.1"),
            *("0.20.2", "0.21.0", "0.22.0", "0.22.1", "0.23.0"),
        ): _guard(15, 15, behind=(11, 12)),
    },
}
