"""Records what the processes of an engine do, independently of the plugin and of its log.

It stands beside vLLM in the environment: ``cgfix_witness.pth`` has every Python process import it
at its start, and vLLM calls :func:`register` wherever it loads its plugins. Each event is a line
``PID EVENT`` of the file that ``CGFIX_TEST_WITNESS`` names.
"""

import os
import sys

_FILE = os.environ.get("CGFIX_TEST_WITNESS")
_TARGETS = frozenset(os.environ.get("CGFIX_TEST_TARGETS", "").split(","))


def _record(event: str) -> None:
    if _FILE:
        # One short write with O_APPEND: lines of several processes do not mix.
        file = os.open(_FILE, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(file, f"{os.getpid()} {event}\n".encode())
        os.close(file)


def register() -> None:
    """What vLLM calls as a general plugin."""
    _record("plugins")


def _hear(event: str, arguments: tuple) -> None:
    # Raised before a module is looked for, and only where it is not there yet.
    if event == "import" and arguments[0] in _TARGETS:
        _record(f"import {arguments[0]}")


if _FILE:
    _record("start")
    os.register_at_fork(after_in_child=lambda: _record(f"fork {os.getppid()}"))
    sys.addaudithook(_hear)
