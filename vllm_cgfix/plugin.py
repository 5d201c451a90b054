"""Settings to decisions to hooks to edited code, and the log lines that say so.

One :class:`_Process` holds what is known in this process. Fixes are decided in
:func:`register`; each module is edited at the end of its import, never before: vLLM loads plugins
in every process, and importing worker code in all of them would cost seconds and could
initialise CUDA before a fork.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import sys
import threading
from collections.abc import Callable
from types import ModuleType

from . import __version__, process_facts
from .code_edit import Edit, EditRefused, SourceEditor, function_names, raise_when_called
from .decision import Decider, ReleaseTable
from .fix import Fix, FixRefused, FixStatus, State, module_path
from .fixes import CATALOGUE, by_id
from .imports import when_imported
from .installation import Installation, NoVllm
from .late_log import when_enabled
from .settings import Settings

# A child of vLLM's logger: it has vLLM's handlers, format and level without importing it.
logger = logging.getLogger("vllm.cgfix")

_IDS = tuple(fix.id for fix in CATALOGUE)


class _Process:
    """What is decided and done in this process."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.strict = False
        self.vllm_version: str | None = None
        self.decider: Decider | None = None
        self.statuses: dict[str, FixStatus] = {}
        self.editors: dict[str, SourceEditor] = {}
        self.hooked: set[str] = set()
        self.registered = False
        self.reports_later = False
        self.reported: set[str] = set()
        self.raising: dict[str, list[Callable[[], None]]] = {}

    def after_fork_in_child(self) -> None:
        """Another thread may have held the lock; and the child's log is its own."""
        self.lock = threading.RLock()
        self.registered = False
        self.reported = set()

    # --- deciding ---

    def decide(self, settings: Settings) -> None:
        """Decide on each chosen fix that has no state yet."""
        chosen = settings.chosen(_IDS)
        self.strict = settings.strict
        undecided = [fix for fix in CATALOGUE if fix.id in chosen and fix.id not in self.statuses]
        if not undecided:
            return
        try:
            self.decider = Decider(Installation.find(), ReleaseTable.load())
            self.vllm_version = self.decider.installation.version
        except NoVllm as error:
            self._refuse_all(undecided, str(error), "install vLLM in this environment")
            return
        except (OSError, ValueError) as error:
            self._refuse_all(undecided, f"the releases table: {error}", "reinstall vllm-cgfix")
            return
        except Exception as error:
            self._refuse_all(undecided, f"deciding failed: {error!r}", "reinstall vllm-cgfix")
            return
        for fix in undecided:
            try:
                status = self.decider.decide(fix, unverified=settings.unverified)
                self.statuses[fix.id] = status
                process_facts.note_release(fix.id, status.release)
            except Exception as error:
                self._refuse_all([fix], f"deciding failed: {error!r}", "reinstall vllm-cgfix")

    def _refuse_all(self, fixes: list[Fix], reason: str, remedy: str) -> None:
        for fix in fixes:
            self.statuses[fix.id] = FixStatus(fix, State.REFUSED, reason, remedy)

    def wanted(self, module: str) -> list[Fix]:
        """The fixes that edit a module and are neither refused nor switched off."""
        return [
            status.fix
            for status in self.in_order()
            if status.state in (State.PENDING, State.APPLIED) and module in status.fix.edits
        ]

    def in_order(self) -> list[FixStatus]:
        """The decided fixes in the catalogue's order."""
        return [self.statuses[fix_id] for fix_id in _IDS if fix_id in self.statuses]

    # --- applying ---

    def edit(self, module: ModuleType) -> None:
        """Edit an imported module with all fixes that want it; whatever goes wrong is a state."""
        name = module.__name__
        wanted = self.wanted(name)
        if not wanted:
            return
        try:
            editor = self._editor(module)
        except Exception as error:
            for fix in wanted:
                self.refuse(fix, error, module)
            return
        if all(editor.is_live(fix.id) for fix in wanted):
            return
        try:
            editor.set_active(self._edits(name, wanted))
        except Exception:
            # One of them is at fault: leave out that one, and only that one.
            good = [fix for fix in wanted if fix.id in editor.active]
            for fix in wanted:
                trial = [other for other in wanted if other in good or other is fix]
                try:
                    editor.set_active(self._edits(name, trial))
                except Exception as error:
                    good = [other for other in good if other is not fix]
                    self.refuse(fix, error, module)
                else:
                    good = trial
        for fix in wanted:
            self._settle(fix)

    def _editor(self, module: ModuleType) -> SourceEditor:
        editor = self.editors.get(module.__name__)
        if editor is None or editor.module is not module:
            assert self.decider is not None, "nothing is wanted before a decision"
            path = module_path(module.__name__)
            editor = SourceEditor(
                module, self.decider.installation.file(path), self.decider.sha256(path) or ""
            )
            self.editors[module.__name__] = editor
        return editor

    @staticmethod
    def _edits(module: str, fixes: list[Fix]) -> dict[str, tuple[Edit, ...]]:
        return {fix.id: fix.edits[module] for fix in fixes}

    def _settle(self, fix: Fix) -> None:
        """A fix is applied once every module that it edits is (or that is imported)."""
        status = self.statuses[fix.id]
        if status.state is State.PENDING and self.is_live(fix):
            status.state = State.APPLIED
            for name in fix.edits:
                if name in self.editors:
                    status.notes += self.editors[name].foreign_wrappers(fix.id)

    def is_live(self, fix: Fix) -> bool:
        """Whether every function that the fix edits runs the edited code."""
        names = [*fix.edits]
        if fix.separate:
            names = [name for name in names if name in sys.modules]
        return bool(names) and all(
            (editor := self.editors.get(name)) is not None
            # A module can be imported a second time, after its removal from sys.modules.
            and editor.module is sys.modules.get(name)
            and editor.is_live(fix.id)
            for name in names
        )

    def refuse(self, fix: Fix, error: Exception, module: ModuleType) -> None:
        """Refuse a fix in the midst of it, and take back what it has in other modules."""
        reason = str(error)
        if not isinstance(error, EditRefused):
            reason = f"editing {module.__name__} failed: {error!r}"
        self.withdraw(fix)
        release = self.statuses[fix.id].release
        self.statuses[fix.id] = FixStatus(
            fix,
            State.REFUSED,
            reason,
            "see `vllm-cgfix status`; remove what changes this code, or leave the fix out "
            f"with VLLM_CGFIX=all,-{fix.id}",
            release,
        )
        if self.strict:
            # An import must not break; the first call of what would have been fixed may.
            error = FixRefused(self.stopped([fix.id]))
            self.raising[fix.id] = [
                raise_when_called(module, qualname, error)
                for qualname in function_names(fix.edits[module.__name__])
            ]

    def refuse_unhooked(self, name: str, error: Exception) -> None:
        """Refuse the fixes of a module whose import cannot be waited for."""
        for fix in self.wanted(name):
            self.withdraw(fix)
            reason = f"waiting for the import of {name} failed: {error!r}"
            self._refuse_all([fix], reason, "reinstall vllm-cgfix and wrapt")

    def withdraw(self, fix: Fix) -> None:
        """Put back the code that a module has without this fix."""
        for name in fix.edits:
            editor = self.editors.get(name)
            if editor is not None and fix.id in editor.active:
                # One that is lost could not be made again, and must not keep this one in.
                others = [id_ for id_ in editor.active if id_ != fix.id and editor.is_live(id_)]
                editor.set_active(self._edits(name, [by_id(id_) for id_ in others]))

    def stopped(self, refused: list[str]) -> str:
        """What ``VLLM_CGFIX_STRICT`` stops with."""
        reasons = "; ".join(str(self.statuses[fix_id]) for fix_id in refused)
        return f"VLLM_CGFIX_STRICT=1 and a requested fix is refused: {reasons}"

    # --- reporting ---

    def report(self) -> None:
        """Log each fix that is applied or refused, once a process.

        And the decision, in a process that has called :func:`register` itself. What the logger
        would drop is not counted as said.
        """
        if self.registered and self.statuses:
            self._say(
                "decision",
                logging.INFO,
                "vllm-cgfix %s on vLLM %s: %s",
                __version__,
                self.vllm_version or "(unknown version)",
                ", ".join(f"{s.fix.id} {s.state.value}" for s in self.in_order()),
            )
        for status in self.in_order():
            if status.state in (State.APPLIED, State.REFUSED):
                level = logging.INFO if status.state is State.APPLIED else logging.WARNING
                event = f"{status.fix.id} {status.state.value}"
                self._say(event, level, "vllm-cgfix: %s", status)

    def _say(self, event: str, level: int, text: str, *arguments: object) -> None:
        if event not in self.reported and logger.isEnabledFor(level):
            self.reported.add(event)
            logger.log(level, text, *arguments)

    def report_when_enabled(self) -> None:
        """Report once more when vLLM's logging is configured.

        From 0.31.0 vLLM does that after it has loaded the plugins of the main process.
        """
        if not self.reports_later and not logger.isEnabledFor(logging.INFO):
            self.reports_later = True
            when_enabled(logger, logging.INFO, self._report_late)

    def _report_late(self) -> None:
        # In a fork of the process that registered there is nothing of its own to say.
        if self.registered:
            self.report()


_process = _Process()
os.register_at_fork(after_in_child=lambda: _process.after_fork_in_child())


def register(settings: Settings) -> None:
    """Decide on the chosen fixes, and apply each when the modules that it edits are imported.

    Raises:
        SettingsError: an id is not valid.
        FixRefused: ``settings.strict``, and a fix is refused.
    """
    with _process.lock:
        _process.decide(settings)
        _process.registered = True
        _process.report()
        modules = [
            name
            for status in _process.in_order()
            if status.state in (State.PENDING, State.APPLIED)
            for name in status.fix.edits
        ]
    # Outside the lock: waiting for another thread's import while that thread's hook waits for
    # the lock would be a deadlock.
    for name in dict.fromkeys(modules):
        try:
            _hook(name)
        except Exception as error:
            with _process.lock:
                _process.refuse_unhooked(name, error)
    with _process.lock:
        _process.report()
        _process.report_when_enabled()
        refused = [s.fix.id for s in _process.in_order() if s.state is State.REFUSED]
    if settings.strict and refused:
        raise FixRefused(_process.stopped(refused))


def _hook(name: str) -> None:
    """Have a module edited once it is imported, or now."""
    with _process.lock:
        waiting = name in _process.hooked and name not in sys.modules
        _process.hooked.add(name)
    # wrapt drops a hook when it fires: one that has not fired must not be doubled.
    if not waiting:
        when_imported(name, _imported)


def _imported(module: ModuleType) -> None:
    with _process.lock:
        _process.hooked.discard(module.__name__)
        try:
            _process.edit(module)
            _process.report()
        except Exception:
            # An import never fails for our sake, not even for a mistake in this file.
            logger.exception("vllm-cgfix: unexpected error at the import of %s", module.__name__)


def decided() -> tuple[str, ...]:
    """The sorted ids of the fixes that are, or are going to be, in the code of this process."""
    live = (State.PENDING, State.APPLIED)
    return tuple(sorted(s.fix.id for s in _process.in_order() if s.state in live))


def status() -> list[FixStatus]:
    """Every fix of the catalogue with its state, applied ones checked against the live code."""
    with _process.lock:
        return [_current(fix) for fix in CATALOGUE]


def _current(fix: Fix) -> FixStatus:
    decided = _process.statuses.get(fix.id, FixStatus(fix, State.OFF))
    if decided.state is State.APPLIED and not _process.is_live(decided.fix):
        return FixStatus(
            fix,
            State.LOST,
            "its module was reloaded or its functions were replaced",
            "restart the process",
            decided.release,
        )
    notes = list(decided.notes)
    runner, left_alone = process_facts.runner(), process_facts.left_alone(fix.id)
    live = decided.state in (State.PENDING, State.APPLIED)
    if live and runner is not None and "runner" in fix.scope and runner not in fix.scope:
        notes.append(f"this process uses the {runner}")
    if left_alone is not None:
        notes.append(f"leaves this engine as it is: {left_alone}")
    return dataclasses.replace(decided, notes=notes)


def undo(fix_id: str | None) -> None:
    """Put back the stock code of one fix, or of all, in this process.

    Raises:
        KeyError: there is no fix of that id.
    """
    with _process.lock:
        for fix in CATALOGUE if fix_id is None else (by_id(fix_id),):
            _process.withdraw(fix)
            for restore in _process.raising.pop(fix.id, ()):
                restore()
            process_facts.forget_left_alone(fix.id)
            _process.statuses.pop(fix.id, None)
            _process.reported -= {f"{fix.id} {state.value}" for state in State}
