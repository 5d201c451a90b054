"""Calling back when a module has been imported, whatever is going on in this process.

``wrapt`` calls a hook at the end of a module's import. Three cases need more than that: the
module is being executed right now (by this thread or another), so that its functions do not
exist yet; another thread is about to execute it and has passed the point where wrapt looks; the
module was imported long ago.
"""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

Callback = Callable[[ModuleType], None]

_registering = threading.local()


def when_imported(name: str, callback: Callback) -> None:
    """Call ``callback(module)`` once the module is fully imported: now, if it is already.

    Args:
        name: the module's full name. It is not imported for this.
        callback: must not raise, since that would fail somebody's import; may be called more
            than once.
    """
    # Here, where the caller can make a state of it: nothing that is missing may stop vLLM.
    import wrapt

    def hook(module: ModuleType) -> None:
        # Within the registration, wrapt hands over whatever sys.modules holds; at any other
        # time it calls at the end of the import.
        if getattr(_registering, "now", False):
            _when_initialized(module, callback)
        else:
            callback(module)

    _registering.now = True
    try:
        wrapt.register_post_import_hook(hook, name)
    finally:
        _registering.now = False
    if name not in sys.modules:
        _wait_for_other_threads(name)
        module = sys.modules.get(name)
        if module is not None:
            _when_initialized(module, callback)


def _wait_for_other_threads(name: str) -> None:
    """Let an import of the module that another thread has begun come to its end."""
    bootstrap: Any = importlib._bootstrap
    bootstrap._lock_unlock_module(name)


def _when_initialized(module: ModuleType, callback: Callback) -> None:
    """Call back at the end of the execution of a module that may be under way."""
    spec: Any = getattr(module, "__spec__", None)
    if not getattr(spec, "_initializing", False):
        callback(module)
        return
    # The import system clears `_initializing` as its last step, in the importing thread: the
    # one moment at which every function exists and none has been called by an importer.
    stock = type(spec)
    set_attribute: Any = stock.__setattr__

    def notify_at_end(self: Any, attribute: str, value: object) -> None:
        ended = attribute == "_initializing" and not value
        if ended:
            # First, since `stock` may be the same for another callback, and undo itself in turn.
            self.__class__ = stock
        set_attribute(self, attribute, value)
        if not ended:
            return
        if sys.modules.get(module.__name__) is module:
            callback(module)
        else:  # the import has failed; there may be another
            when_imported(module.__name__, callback)

    spec.__class__ = type(stock.__name__, (stock,), {"__setattr__": notify_at_end})
    if not spec._initializing:  # it came to its end between the two looks
        spec.__class__ = stock
        callback(module)
