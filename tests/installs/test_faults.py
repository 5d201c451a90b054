"""Faults of an installation and of a machine: each has its state and its message, and vLLM runs on.

Those that a real engine must survive are in ``tests/engine``; those of the process, such as a
failing import or a reload, in ``tests/releases/test_processes.py``.
"""

from __future__ import annotations

import bdb
import importlib
import importlib.machinery
import importlib.util
import json
import os
import resource
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.needs import modules, needed, states_with_all
from tests.releases import test_processes as life
from tests.releases.process import environment, on_path, run_python
from tests.releases.scenarios import TARGET, ForkServer, import_all_but_target
from tests.releases.sources import source_dir
from tests.releases.test_pythons import interpreter
from vllm_cgfix.fixes import CATALOGUE, by_id

from .environments import Environment, replace

VARIABLES = life.VARIABLES
MODULES = tuple(by_id("skip-attention").edits)

# --- the table of releases, in a real install ---------------------------------------------------

_REGISTER = """
import vllm_cgfix
vllm_cgfix.register()
for status in vllm_cgfix.status():
    print(status)
"""


@pytest.mark.parametrize("content", [None, b"{", b"\xff", b"{}"], ids=repr)
def test_a_damaged_or_absent_table(
    install: Callable[[str], Environment], content: bytes | None
) -> None:
    installed = install("0.11.2")
    table = installed.site_packages / "vllm_cgfix" / "releases.json"
    table.unlink()
    if content is not None:
        replace(table, content)
    status = installed.run("-m", "vllm_cgfix.cli", "status")
    assert status.returncode == 1
    assert "releases.json of this installation: " in status.stderr
    assert "Traceback" not in status.stderr

    registered = installed.run("-c", _REGISTER, VLLM_CGFIX="1")
    assert registered.returncode == 0, registered.stderr
    lines = registered.stdout.splitlines()
    assert len(lines) == len(CATALOGUE)
    for line in lines:
        assert " refused: the releases table: " in line
        assert line.endswith(" -> reinstall vllm-cgfix")


# --- modules that do not come out of a source file ----------------------------------------------

_FROM_ZIP = """
import vllm_cgfix
vllm_cgfix.register()
import vllm.version
assert ".zip" in vllm.version.__file__
print(vllm.version.__version__)
for status in vllm_cgfix.status():
    print(status)
"""


def test_vllm_in_a_zip_file(tmp_path: Path) -> None:
    archive = tmp_path / "vllm.zip"
    with zipfile.ZipFile(archive, "w") as file:
        for source in source_dir("0.33.0").glob("vllm/**/*.py"):
            file.write(source, source.relative_to(source_dir("0.33.0")))
    variables = on_path(archive, VLLM_CGFIX="1")
    version, *states = run_python(_FROM_ZIP, variables).stdout.splitlines()
    assert version == "0.33.0"
    assert len(states) == len(CATALOGUE)
    for state in states:
        assert " refused: " in state
        assert f"{archive}/vllm is not a directory of source files" in state

    command = [sys.executable, "-m", "vllm_cgfix.cli", "status"]
    done = subprocess.run(command, env=variables, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2
    assert "is not a directory of source files" in done.stdout


@pytest.fixture(scope="module")
def stock() -> Iterator[ForkServer]:
    """0.11.2 with all imported but the model runner."""
    server = ForkServer(environment("0.11.2", **VARIABLES), import_all_but_target)
    yield server
    server.close()


class _Frozen:
    """Imports the target as a frozen module is: code that is in the program, and no file."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != TARGET:
            return None
        return importlib.machinery.ModuleSpec(name, self, origin="frozen")

    def create_module(self, spec: Any) -> None:
        return None

    def exec_module(self, module: Any) -> None:
        found = importlib.machinery.PathFinder.find_spec(
            TARGET, importlib.import_module(TARGET.rpartition(".")[0]).__path__
        )
        assert found is not None
        assert found.loader is not None
        exec(found.loader.get_code(TARGET), module.__dict__)  # type: ignore[attr-defined]


def _import_frozen() -> Any:
    life._register()
    # Where Python's own importer of frozen modules stands: behind wrapt's, before that of files.
    sys.meta_path.insert(1, _Frozen())  # type: ignore[arg-type]
    module = life._import_target()
    assert module.__spec__.origin == "frozen"
    status = life._status()
    return life._state(), life._fixed(), status.reason


def test_a_frozen_module(stock: ForkServer) -> None:
    ended = stock.run(_import_frozen, **life.ON)
    state, runs, reason = ended.value
    assert (state, runs) == ("refused", "stock")
    assert reason.startswith(f"{TARGET} was loaded from frozen, not from ")
    assert [line for line in ended.log if life.REFUSED.search(line) and "frozen" in line]


# --- a disk that is full or read-only -----------------------------------------------------------

_WRITES = """
import os, sys

written = []
CHANGES = ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "os.symlink",
           "os.truncate", "os.chmod", "os.utime", "shutil.", "tempfile.", "subprocess.", "socket.")

def is_ours():
    frame = sys._getframe(2)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name.split(".")[0] == "vllm_cgfix":
            return True
        if name == "importlib._bootstrap" or name.startswith("vllm."):
            return False  # an import, and what a module does in it, is not the plugin's doing
        frame = frame.f_back
    return False

def hear(event, arguments):
    if event == "open":
        _, mode, flags = arguments
        writes = flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
    else:
        writes = event.startswith(CHANGES)
    if writes and is_ours():
        written.append((event, arguments))

sys.addaudithook(hear)
exec("open('/dev/null', 'w').close()", {"__name__": "vllm_cgfix.control"})
assert len(written) == 1, "the hook hears of what a module of ours writes"
written.clear()

# torch looks for a folder that it can write to.
import tempfile
tempfile.tempdir = "/tmp"
import vllm_cgfix
vllm_cgfix.register()
from vllm_cgfix.verify import cpu
cpu.use_cpu_platform()
import importlib, json
for name in MODULES:
    importlib.import_module(name)
from vllm_cgfix.cli import main
states = {status.fix.id: status.state.value for status in vllm_cgfix.status()}
vllm_cgfix.undo()
main(["status"])
print(json.dumps([states, [*map(repr, written)]]))
"""


def _no_space_left() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))


@pytest.mark.parametrize("release", ["0.11.2", "0.33.0"])
def test_a_full_disk_and_no_home(release: str) -> None:
    variables = environment(release, **VARIABLES, VLLM_CGFIX="all", HOME="/nonexistent")
    done = subprocess.run(
        # -B: what Python compiles, it would keep.
        [sys.executable, "-B", "-c", f"MODULES = {modules(needed(release))!r}\n{_WRITES}"],
        env=variables,
        cwd="/proc",
        preexec_fn=_no_space_left,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    states, written = json.loads(done.stdout.splitlines()[-1])
    assert states == states_with_all(release, "applied")
    assert written == []


# --- debuggers and other tools that trace -------------------------------------------------------


class _Debugger(bdb.Bdb):
    """Stops at a line, as a debugger does, and goes on."""

    def __init__(self) -> None:
        super().__init__()
        self.stopped: list[tuple[str, int]] = []

    def user_line(self, frame: Any) -> None:
        if self.break_here(frame):
            self.stopped.append((frame.f_code.co_name, frame.f_lineno))
        self.set_continue()


def _traced(how: str) -> Any:
    """A dummy run beneath a tracer that was there before the fix; the lines of it that ran."""
    file = importlib.util.find_spec(TARGET).origin  # type: ignore[union-attr]
    lines: list[int] = []

    def trace(frame: Any, event: str, argument: Any) -> Any:
        if frame.f_code.co_filename != file or frame.f_code.co_name != "_dummy_run":
            return None
        if event in ("line", "call"):
            lines.append(frame.f_lineno)
        return trace

    set_trace = {"settrace": sys.settrace, "setprofile": sys.setprofile}[how]
    set_trace(trace)
    threading.settrace(trace)
    life._register()
    life._import_target()
    runs = life._fixed()
    set_trace(None)
    return life._state(), runs, len(lines)


@pytest.mark.parametrize(("how", "at_least"), [("settrace", 10), ("setprofile", 1)])
def test_beneath_a_tracer(stock: ForkServer, how: str, at_least: int) -> None:
    state, runs, lines = stock.run(_traced, how, **life.ON).value
    assert (state, runs) == ("applied", "fixed")
    assert lines >= at_least


def _debugged() -> Any:
    life._register()
    module = life._import_target()
    function = life._function(module)
    text = Path(module.__file__).read_text("utf-8").splitlines()
    (line,) = [
        number
        for number in sorted({line for *_, line in function.__code__.co_lines() if line})
        if text[number - 1].strip().startswith("attn_metadata: ")
    ]
    debugger = _Debugger()
    assert debugger.set_break(module.__file__, line) is None
    debugger.set_trace()
    runs = life._fixed()
    debugger.set_quit()
    sys.settrace(None)
    return runs, debugger.stopped, line


def test_a_debugger_stops_where_the_file_says(stock: ForkServer) -> None:
    runs, stopped, line = stock.run(_debugged, **life.ON).value
    assert runs == "fixed"
    assert stopped == [("_dummy_run", line)]


_MONITORED = """
import hashlib, importlib.util, sys
from pathlib import Path
from vllm_cgfix.code_edit import EditFunction, Insert, SourceEditor

lines = []
def hear(code, line):
    if code.co_filename == FILE and code.co_name == "double":
        lines.append(line)
monitoring = sys.monitoring
monitoring.use_tool_id(monitoring.DEBUGGER_ID, "test")
monitoring.register_callback(monitoring.DEBUGGER_ID, monitoring.events.LINE, hear)
monitoring.set_events(monitoring.DEBUGGER_ID, monitoring.events.LINE)

spec = importlib.util.spec_from_file_location("sample", FILE)
module = importlib.util.module_from_spec(spec)
sys.modules["sample"] = module
spec.loader.exec_module(module)
stock_code = module.double.__code__
assert module.double(2) == 4  # the running code is instrumented from here on
editor = SourceEditor(module, FILE, hashlib.sha256(Path(FILE).read_bytes()).hexdigest())
edit = EditFunction("double", (Insert("number = number + 1", before="return ..."),))
editor.set_active({"one": (edit,)})
assert editor.is_live("one")
assert module.double(2) == 6
editor.set_active({})
assert module.double.__code__ is stock_code
assert module.double(2) == 4
print(lines)
"""


@pytest.mark.parametrize("version", ["3.12", "3.13", "3.14"])
def test_beneath_sys_monitoring(tmp_path: Path, version: str) -> None:
    python = interpreter(version)
    if python is None:
        pytest.skip(f"no Python {version} here")
    file = tmp_path / "sample.py"
    file.write_text("def double(number):\n    return number * 2\n")
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        [python, "-c", f"FILE = {str(file)!r}\n{_MONITORED}"],
        env={**os.environ, "PYTHONPATH": root},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    # The line that is inserted is that of the statement it stands before.
    assert done.stdout.strip() == "[2, 2, 2]"


# --- sixteen threads import the five modules of skip-attention while two register ----------------


def _import_what_they_need() -> None:
    """What takes seconds; the modules themselves are imported by the threads."""
    from vllm_cgfix.verify import cpu

    cpu.use_cpu_platform()
    importlib.import_module("vllm.config")
    importlib.import_module("transformers")
    logging_config = importlib.import_module("vllm.config.logging").LoggingConfig()
    importlib.import_module("vllm.logger").configure_logging(logging_config)
    assert not [name for name in MODULES if name in sys.modules]


@pytest.fixture(scope="module")
def newest() -> Iterator[ForkServer]:
    server = ForkServer(environment("0.33.0", **VARIABLES), _import_what_they_need)
    yield server
    server.close()


def _import_together(delay: float) -> Any:
    swaps = life._count_swaps()

    def import_all() -> None:
        for name in MODULES:
            importlib.import_module(name)

    def register() -> None:
        time.sleep(delay)
        life._register()

    life._together(*[import_all] * 16, register, register)
    state = {s.fix.id: s.state.value for s in importlib.import_module("vllm_cgfix").status()}
    return state["skip-attention"], len(swaps)


@pytest.mark.parametrize("delay", [0, 0.1, 0.5, 2])
def test_sixteen_threads_import_five_modules_while_two_register(
    newest: ForkServer, delay: float
) -> None:
    ended = newest.run(_import_together, delay, VLLM_CGFIX="skip-attention")
    assert ended.value == ("applied", len(MODULES))
    assert len([line for line in ended.log if "skip-attention applied" in line]) == 1
    assert len(ended.log) == 2, ended.log
