"""What a fix is, and the states it can be in."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from .code_edit import Edit


class FixRefused(RuntimeError):
    """A requested fix is refused and ``VLLM_CGFIX_STRICT=1`` asks to stop for that."""


@dataclass(frozen=True, kw_only=True, repr=False)
class Fix:
    """One correction of vLLM, as edits of its source files.

    Attributes:
        id: what users type in ``VLLM_CGFIX``.
        title: one line, what the fix changes.
        symptom: one line, what users see without it, in their words.
        error_patterns: regular expressions (case ignored) of log or error text that points
            to the fault.
        upstream: the pull requests or issues behind it, such as ``"PR 27382"``.
        scope: which part of vLLM it concerns, such as ``"V1 runner"`` or ``"engine core"``.
        releases: the vLLM releases that need it, each proved by ``tests/releases``. The edited
            files must tell them from the others: no release that does not need the fix may have
            the same content in all of them.
        edits: module name to the edits of that module's source file. A fix is applied to all
            of them or to none.
        separate: each module is mended by itself, as those of the two model runners are, of which
            a process may import only one: the fix is applied once the modules that are imported
            are edited.
        only_in: module name to the releases in which that module is edited, where these are not
            all of ``releases``: in the others nothing is wrong in it, or it does not exist.
        witnesses: paths (``vllm/...``) of files that the edits rely on without touching them.
            Where the fix is needed, these and the edited files must all be of one release,
            otherwise it is refused.
    """

    id: str
    title: str
    symptom: str
    error_patterns: tuple[str, ...]
    upstream: tuple[str, ...]
    scope: str
    releases: tuple[str, ...]
    edits: Mapping[str, tuple[Edit, ...]]
    witnesses: tuple[str, ...] = ()
    separate: bool = False
    only_in: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"Fix({self.id!r})"

    @property
    def edited_files(self) -> tuple[str, ...]:
        """The paths (``vllm/...``) of the files that the fix edits."""
        return tuple(module_path(module) for module in self.edits)

    def for_release(self, release: str | None) -> Fix:
        """The fix with the edits of one release; all of it for one that does not need it."""
        if not self.only_in or release not in self.releases:
            return self
        edits = {
            module: edits
            for module, edits in self.edits.items()
            if release in self.only_in.get(module, self.releases)
        }
        return replace(self, edits=edits)


def module_path(module: str) -> str:
    """The path of a module's source file, as a wheel lists it.

    >>> module_path("vllm.v1.worker.gpu_model_runner")
    'vllm/v1/worker/gpu_model_runner.py'
    """
    return module.replace(".", "/") + ".py"


class State(str, enum.Enum):
    """The state of a fix; the value is what logs and the command line show."""

    OFF = "off"
    """Not asked for, or undone."""
    NOT_NEEDED = "not-needed"
    """This release never had the fault, or has the fix."""
    PENDING = "pending"
    """Decided; a module that it edits is not imported yet in this process."""
    APPLIED = "applied"
    """The live code of this process is the edited code."""
    REFUSED = "refused"
    """Not applied, and nothing of it is; the reason says why."""
    LOST = "lost"
    """It was applied, but the module has been reloaded or its functions replaced since."""


@dataclass
class FixStatus:
    """A fix and where it stands.

    Attributes:
        fix: the fix.
        state: its state.
        reason: why, in a sentence; empty where the state says it all.
        remedy: what the user can do about a refusal; empty otherwise.
        release: the release whose sources were found, such as ``"0.11.2"``; None if unknown.
        notes: further facts, such as the wrapper that a function was edited beneath.
    """

    fix: Fix
    state: State
    reason: str = ""
    remedy: str = ""
    release: str | None = None
    notes: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        text = f"{self.fix.id} {self.state.value}"
        if self.state in (State.PENDING, State.APPLIED):
            text += f" ({self.fix.scope})"
        if self.reason:
            text += f": {self.reason}"
        if self.remedy:
            text += f" -> {self.remedy}"
        return text + "".join(f" [{note}]" for note in self.notes)
