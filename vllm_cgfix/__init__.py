"""CUDA-graph correctness fixes for an unmodified vLLM.

vLLM calls :func:`register` in every process it starts (entry point ``cgfix`` of the
group ``vllm.general_plugins``). What is applied is chosen by ``VLLM_CGFIX``; see
:mod:`vllm_cgfix.settings`.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .fix import FixStatus

__version__ = "0.1.0"
__all__ = ["__version__", "register", "status", "undo"]


def register() -> None:
    """Decide on every fix that ``VLLM_CGFIX`` asks for, and apply it when its module is imported.

    Safe to call any number of times, from any thread and in forked or spawned children.

    Raises:
        vllm_cgfix.settings.SettingsError: a ``VLLM_CGFIX*`` variable holds a word that is
            not valid; raised again by every call.
        vllm_cgfix.fix.FixRefused: ``VLLM_CGFIX_STRICT=1`` and a requested fix is refused.
    """
    # Most processes in which vLLM loads its plugins never asked for this one: they pay
    # for a look at the environment and for nothing else.
    if any(name.startswith("VLLM_CGFIX") for name in os.environ):
        from . import settings

        settings.register_with_vllm()
        chosen = settings.read(os.environ)
        if chosen.words:
            from . import plugin

            plugin.register(chosen)


def status() -> list[FixStatus]:
    """The state of every fix in this process, by comparing live code objects.

    Empty where :func:`register` has had nothing to decide (not called, or switched off).
    """
    import sys

    # Not imported means never switched on; asking must not be what loads the machinery.
    plugin = sys.modules.get(f"{__name__}.plugin")
    return [] if plugin is None else plugin.status()


def undo(fix: str | None = None) -> None:
    """Put vLLM's own code back in this process, for one fix id or for all.

    The next call of :func:`register` decides anew, and applies it again where it is asked for.
    Does nothing where the plugin was never switched on.

    Raises:
        KeyError: there is no fix of that id.
    """
    import sys

    plugin = sys.modules.get(f"{__name__}.plugin")
    if plugin is not None:
        plugin.undo(fix)
