"""The life of a process: whatever happens around the import of vLLM's model runner.

Everything runs on the stock sources of vLLM 0.11.2 (the settings also on those of 0.12.0, 0.20.0
and 0.33.0), each test in a process of its own, see :mod:`tests.releases.scenarios`. A function
whose name begins with an underscore runs in that process; what it returns the test judges.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import inspect
import itertools
import json
import multiprocessing
import os
import re
import struct
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FunctionType, ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.needs import applied_lines, decision, modules, needed, states_with_all
from vllm_cgfix.code_edit import EditFunction, Insert
from vllm_cgfix.fix import Fix

from .process import environment, on_path, run_python
from .scenarios import (
    TARGET,
    TARGET_PATH,
    ForkServer,
    Overlay,
    import_all_but_target,
    run_in_fork,
)

WITNESS_PATH = "vllm/v1/worker/block_table.py"
IMPORTED_BY_TARGET = "vllm.v1.worker.utils"
# By its id: the log and the states are then of this fix alone.
ON = {"VLLM_CGFIX": "dispatch-order"}
# vLLM's own plugins import much of vLLM.
VARIABLES = {"VLLM_LOGGING_LEVEL": "INFO", "VLLM_PLUGINS": "cgfix"}
DECISION = re.compile(
    r"INFO \d\d-\d\d \d\d:\d\d:\d\d \[plugin\.py:\d+\] "
    r"vllm-cgfix [\d.]+ on vLLM 0\.11\.2: dispatch-order (pending|applied|refused)$"
)
APPLIED = re.compile(
    r"INFO \d\d-\d\d \d\d:\d\d:\d\d \[plugin\.py:\d+\] "
    r"vllm-cgfix: dispatch-order applied \(V1 runner\)"
)
REFUSED = re.compile(r"WARNING .*\[plugin\.py:\d+\] vllm-cgfix: dispatch-order refused: ")


@pytest.fixture(scope="module")
def stock() -> Iterator[ForkServer]:
    """0.11.2 with all imported but the model runner."""
    server = ForkServer(
        environment("0.11.2", **VARIABLES),
        import_all_but_target,
    )
    yield server
    server.close()


@pytest.fixture(scope="module")
def overlay(tmp_path_factory: pytest.TempPathFactory) -> Overlay:
    return Overlay("0.11.2", tmp_path_factory.mktemp("overlay") / "sources")


@pytest.fixture(scope="module")
def overlay_server(overlay: Overlay, stock: ForkServer) -> Iterator[ForkServer]:
    """The same on sources of which single files can be changed."""
    server = ForkServer(on_path(overlay.folder, **VARIABLES), import_all_but_target)
    yield server
    server.close()


@pytest.fixture
def changed(overlay: Overlay, overlay_server: ForkServer) -> Iterator[Overlay]:
    """The sources of ``overlay_server``, put back after the test."""
    yield overlay
    overlay.restore()


def assert_reported_once(log: list[str]) -> None:
    """One decision line and one ``applied`` line, in vLLM's own format."""
    assert len(log) == 2, log
    assert DECISION.fullmatch(log[0]), log[0]
    assert APPLIED.fullmatch(log[1]), log[1]


# --- what the scenarios are made of -------------------------------------------------------------


def _import_target() -> Any:
    return importlib.import_module(TARGET)


def _register() -> None:
    importlib.import_module("vllm_cgfix").register()


def _status() -> Any:
    """The status of dispatch-order; None if nothing was ever decided."""
    found = importlib.import_module("vllm_cgfix").status()
    return {status.fix.id: status for status in found}.get("dispatch-order")


def _state() -> str:
    status = _status()
    return "none" if status is None else str(status.state.value)


def _function(module: Any) -> FunctionType:
    """``_dummy_run`` beneath its decorator."""
    member: FunctionType = inspect.unwrap(module.GPUModelRunner.__dict__["_dummy_run"])
    return member


class _BuildsMetadata(Exception):
    pass


class _BuildsNoMetadata(Exception):
    pass


def _raiser(error: type[BaseException], text: str = "") -> Callable[..., Any]:
    def raise_it(*args: object, **kwargs: object) -> Any:
        raise error(text)

    return raise_it


def _runner(runner_class: Any = None) -> Any:
    """A runner with what a ``_dummy_run(1)`` asks for until the fix shows, or its absence."""
    module = _import_target()
    runner = object.__new__(runner_class or module.GPUModelRunner)
    parallel = SimpleNamespace(data_parallel_size=1, data_parallel_rank=0)
    mode = module.CUDAGraphMode.FULL
    descriptor = module.BatchDescriptor(1)
    for name, value in {
        "uniform_decode_query_len": 1,
        "scheduler_config": SimpleNamespace(max_num_batched_tokens=64, max_num_seqs=8),
        "compilation_config": SimpleNamespace(cudagraph_mode=mode),
        "parallel_config": parallel,
        "vllm_config": SimpleNamespace(parallel_config=parallel),
        "cudagraph_dispatcher": SimpleNamespace(dispatch=lambda *args: (mode, descriptor)),
        "lora_config": None,
        "synchronize_input_prep": _raiser(_BuildsMetadata),
        "maybe_dummy_run_with_lora": _raiser(_BuildsNoMetadata),
    }.items():
        setattr(runner, name, value)
    return runner


def _runs(call: Callable[[], object]) -> str:
    """Whether a dummy run for which the dispatcher answers FULL is fixed, by what it does."""
    try:
        call()
    except _BuildsMetadata:
        return "fixed"
    except _BuildsNoMetadata:
        return "stock"
    return "neither"


def _fixed() -> str:
    runner = _runner()
    return _runs(lambda: runner._dummy_run(1))


def _count_swaps() -> list[dict[str, Any]]:
    """Each time that a code object is put into the target from here on."""
    from vllm_cgfix.code_edit import SourceEditor

    swaps = []
    set_active = SourceEditor.set_active

    def counting(self: SourceEditor, edits: Any) -> None:
        swaps.append(dict(edits))
        set_active(self, edits)

    SourceEditor.set_active = counting  # type: ignore[method-assign]
    return swaps


class _AtImport:
    """A finder that finds nothing, and calls something when a module is looked for."""

    def __init__(self, name: str, call: Callable[[], object]):
        self.name = name
        self.call = call

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name == self.name:
            sys.meta_path.remove(self)  # type: ignore[arg-type]
            self.call()


def _call_during_import(call: Callable[[], object]) -> None:
    """Have something called in the midst of the target's import, as it imports from a module.

    Not by a finder: Python 3.11 holds the import lock of the whole process meanwhile.
    """
    imported = sys.modules[IMPORTED_BY_TARGET]

    class Calling(ModuleType):
        def __getattr__(self, name: str) -> Any:
            if sys.modules[IMPORTED_BY_TARGET] is self:
                sys.modules[IMPORTED_BY_TARGET] = imported
                call()
            return getattr(imported, name)

    sys.modules[IMPORTED_BY_TARGET] = Calling(IMPORTED_BY_TARGET)


def _in_thread(call: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    return thread


# --- 1. when register() is called ---------------------------------------------------------------


def _registering(*events: str) -> Any:
    """``register`` and ``import`` in this order."""
    swaps = _count_swaps()
    for event in events:
        {"register": _register, "import": _import_target}[event]()
    return _fixed(), _state(), len(swaps)


@pytest.mark.parametrize(
    "events",
    [
        ("register", "import"),
        ("register", "register", "import"),
        ("register", "import", "register"),
        ("import", "register"),
        ("import", "register", "register"),
    ],
    ids=",".join,
)
def test_register_before_and_after_the_import_and_twice(
    stock: ForkServer, events: tuple[str, ...]
) -> None:
    ended = stock.run(_registering, *events, **ON)
    assert ended.value == ("fixed", "applied", 1)
    assert_reported_once(ended.log)


def _registering_all(*names: str) -> Any:
    swaps = _count_swaps()
    _register()
    for name in names:
        importlib.import_module(name)
    _register()
    return _fixed(), _states(), len(swaps)


def test_all_fixes_are_reported_in_one_decision_line(stock: ForkServer) -> None:
    fixes = needed("0.11.2")
    assert len(fixes) > 1
    names = modules(fixes)
    ended = stock.run(_registering_all, *names, VLLM_CGFIX="1")
    # Once a module, however many fixes edit it.
    assert ended.value == ("fixed", states_with_all("0.11.2", "applied"), len(names))
    decided, *applied = ended.log
    assert decided.endswith(f" on vLLM 0.11.2: {decision(states_with_all('0.11.2', 'pending'))}")
    assert sorted(line.partition("] ")[2] for line in applied) == applied_lines(fixes)
    assert [line for line in applied if APPLIED.fullmatch(line)]


def test_without_register_nothing_is_changed(stock: ForkServer) -> None:
    ended = stock.run(_registering, "import", **ON)
    assert ended.value == ("stock", "none", 0)
    assert ended.log == []


@pytest.mark.parametrize("value", ["", "0", "off", "OFF"])
def test_switched_off_nothing_is_changed(stock: ForkServer, value: str) -> None:
    ended = stock.run(_registering, "register", "import", "register", VLLM_CGFIX=value)
    assert ended.value == ("stock", "none", 0)
    assert ended.log == []


def _together(*calls: Callable[[], object]) -> None:
    """Make calls at once, each in a thread of its own; raises what one of them raises."""
    barrier = threading.Barrier(len(calls))
    errors: list[BaseException] = []

    def run(call: Callable[[], object]) -> None:
        barrier.wait()
        try:
            call()
        except BaseException as error:
            errors.append(error)

    # The shortest of turns: threads meet in the midst of everything.
    sys.setswitchinterval(1e-5)
    threads = [_in_thread(functools.partial(run, call)) for call in calls]
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def _two_threads_register(imported: bool) -> Any:
    swaps = _count_swaps()
    if imported:
        _import_target()
    _together(_register, _register)
    _import_target()
    return _fixed(), _state(), len(swaps)


@pytest.mark.parametrize("imported", [False, True], ids=["before", "after"])
def test_register_from_two_threads(stock: ForkServer, imported: bool) -> None:
    for _ in range(5):
        ended = stock.run(_two_threads_register, imported, **ON)
        assert ended.value == ("fixed", "applied", 1)
        assert_reported_once(ended.log)


def _many_threads_import(delay: float) -> Any:
    swaps = _count_swaps()

    def register() -> None:
        time.sleep(delay)
        _register()

    _together(*[_import_target] * 16, register, register)
    return _fixed(), _state(), len(swaps)


# Importing the target takes some 5 ms once its own imports are there, deciding some 10 ms more.
@pytest.mark.parametrize("delay", [0, 0.002, 0.005, 0.01, 0.02, 0.05])
def test_sixteen_threads_import_while_two_register(stock: ForkServer, delay: float) -> None:
    for _ in range(3):
        ended = stock.run(_many_threads_import, delay, **ON)
        assert ended.value == ("fixed", "applied", 1)
        assert_reported_once(ended.log)


def _every_importer_sees_it() -> list[str]:
    """What each of 16 threads finds at the moment at which its own import returns."""
    _register()
    found: list[str] = []

    def look() -> None:
        code = _function(_import_target()).__code__
        found.append("fixed" if "prepare_dummy_batch" in code.co_varnames else "stock")

    _together(*[look] * 16)
    return found


def test_no_importer_gets_a_module_that_is_not_fixed_yet(stock: ForkServer) -> None:
    ended = stock.run(_every_importer_sees_it, **ON)
    assert ended.value == ["fixed"] * 16


def _registered_during_the_import(times: int) -> Any:
    swaps = _count_swaps()
    existed = []

    def register() -> None:
        existed.append(hasattr(sys.modules[TARGET], "GPUModelRunner"))
        for _ in range(times):
            _register()

    _call_during_import(register)
    spec = _import_target().__spec__
    return _fixed(), _state(), len(swaps), existed, type(spec) is importlib.machinery.ModuleSpec


@pytest.mark.parametrize("times", [1, 2])
def test_register_called_from_what_the_target_imports(stock: ForkServer, times: int) -> None:
    ended = stock.run(_registered_during_the_import, times, **ON)
    *applied, existed, spec_is_stock = ended.value
    assert existed == [False], "the scenario is not that of a module in the midst of its import"
    assert applied == ["fixed", "applied", 1]
    assert_reported_once(ended.log)
    assert spec_is_stock, "the import left a changed class on the module's __spec__"


def _registered_by_another_thread_during_the_import() -> Any:
    swaps = _count_swaps()

    def register() -> None:
        thread = _in_thread(_register)
        thread.join(20)
        assert not thread.is_alive(), "register() waits for an import that waits for it"

    _call_during_import(register)
    _import_target()
    return _fixed(), _state(), len(swaps)


def test_register_by_another_thread_while_the_target_is_executed(stock: ForkServer) -> None:
    ended = stock.run(_registered_by_another_thread_during_the_import, **ON)
    assert ended.value == ("fixed", "applied", 1)
    assert_reported_once(ended.log)


def _registered_by_another_thread_just_before_the_execution() -> Any:
    swaps = _count_swaps()
    threads = []
    importlib.import_module("vllm_cgfix.plugin")  # the importing thread will hold import locks

    def register() -> None:
        assert TARGET not in sys.modules
        threads.append(_in_thread(_register))
        threads[0].join(1)  # as far as it comes while this import waits

    # Behind wrapt's finder: wrapt has looked, and has found that nobody wants this module.
    sys.meta_path.insert(1, _AtImport(TARGET, register))  # type: ignore[arg-type]
    assert "wrapt" in type(sys.meta_path[0]).__module__
    _import_target()
    threads[0].join(20)
    assert not threads[0].is_alive()
    return _fixed(), _state(), len(swaps)


def test_register_by_another_thread_between_finding_and_executing(stock: ForkServer) -> None:
    ended = stock.run(_registered_by_another_thread_just_before_the_execution, **ON)
    assert ended.value == ("fixed", "applied", 1)
    assert_reported_once(ended.log)


def _import_fails_once(register_during_it: bool) -> Any:
    if not register_during_it:
        _register()
    swaps = _count_swaps()

    def fail() -> None:
        if register_during_it:
            _register()
        raise ImportError("once")

    _call_during_import(fail)
    try:
        _import_target()
    except ImportError as error:
        message = str(error)
    _register()
    _import_target()
    return message, _fixed(), _state(), len(swaps)


@pytest.mark.parametrize("during", [False, True], ids=["before", "during"])
def test_register_around_an_import_that_fails_and_is_repeated(
    stock: ForkServer, during: bool
) -> None:
    ended = stock.run(_import_fails_once, during, **ON)
    assert ended.value == ("once", "fixed", "applied", 1)
    assert_reported_once(ended.log)


# --- 1. forked and spawned children -------------------------------------------------------------


def _child(*events: str) -> tuple[Any, list[str]]:
    ended = run_in_fork(_registering, *events)
    return ended.value[:2], ended.log


def _fork_before_the_import(*events: str) -> Any:
    _register()
    return _child(*events)


def _fork_after_the_import(*events: str) -> Any:
    _register()
    _import_target()
    return _child(*events)


def test_child_forked_before_the_import_never_registers(stock: ForkServer) -> None:
    ended = stock.run(_fork_before_the_import, "import", **ON)
    found, log = ended.value
    assert found == ("fixed", "applied")
    assert len(log) == 1, log
    assert APPLIED.fullmatch(log[0])
    assert [bool(DECISION.fullmatch(line)) for line in ended.log] == [True], "the parent's own log"


def test_child_forked_before_the_import_registers(stock: ForkServer) -> None:
    found, log = stock.run(_fork_before_the_import, "register", "import", "register", **ON).value
    assert found == ("fixed", "applied")
    assert_reported_once(log)


def test_child_forked_after_the_import_never_registers(stock: ForkServer) -> None:
    ended = stock.run(_fork_after_the_import, "import", **ON)
    found, log = ended.value
    assert found == ("fixed", "applied")
    assert log == [], "nothing is decided and nothing applied in this process"
    assert_reported_once(ended.log)


def test_child_forked_after_the_import_registers(stock: ForkServer) -> None:
    ended = stock.run(_fork_after_the_import, "register", "register", **ON)
    found, log = ended.value
    assert found == ("fixed", "applied")
    assert_reported_once(log)
    assert_reported_once(ended.log)


def _fork_while_a_thread_registers() -> Any:
    plugin = importlib.import_module("vllm_cgfix.plugin")
    held, leave = threading.Event(), threading.Event()
    decide = plugin._process.decide

    def decide_slowly(settings: Any) -> None:
        held.set()
        leave.wait(30)
        decide(settings)

    plugin._process.decide = decide_slowly
    thread = _in_thread(_register)
    held.wait(30)
    plugin._process.decide = decide
    child = _child("register", "import")
    leave.set()
    thread.join()
    return child


def test_child_forked_while_another_thread_registers(stock: ForkServer) -> None:
    found, log = stock.run(_fork_while_a_thread_registers, **ON).value
    assert found == ("fixed", "applied")
    assert_reported_once(log)


def _spawned(log_file: str, events: tuple[str, ...], answer: Any) -> None:
    log = os.open(log_file, os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    from vllm_cgfix.verify import cpu

    cpu.use_cpu_platform()
    answer.send(_registering(*events))


def _spawn(folder: str) -> Any:
    """Of two spawned children of a process that has the fix, one registers and one does not."""
    _register()
    _import_target()
    context = multiprocessing.get_context("spawn")
    started = []
    for events in (("register", "import", "register"), ("import",)):
        receiver, sender = context.Pipe(duplex=False)
        log = f"{folder}/{len(events)}"
        process = context.Process(target=_spawned, args=(log, events, sender))
        process.start()
        sender.close()
        started.append((receiver, log, process))
    found = []
    for receiver, log, process in started:
        value = receiver.recv()
        process.join()
        lines = [line for line in Path(log).read_text().splitlines() if "vllm-cgfix" in line]
        found.append((value, lines))
    return found


@pytest.fixture(scope="module")
def spawned(stock: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return stock.run(_spawn, str(tmp_path_factory.mktemp("spawned")), **ON).value


def test_spawned_child_registers(spawned: Any) -> None:
    value, log = spawned[0]
    assert value == ("fixed", "applied", 1)
    assert_reported_once(log)


def test_spawned_child_that_never_registers_has_stock_code(spawned: Any) -> None:
    value, log = spawned[1]
    assert value == ("stock", "none", 0)
    assert log == []


# --- 2. the edited function ---------------------------------------------------------------------


def _looks(module: Any) -> dict[str, Any]:
    member = module.GPUModelRunner.__dict__["_dummy_run"]
    function = _function(module)
    code = function.__code__
    return {
        "member": id(member),
        "function": id(function),
        "wrapped": id(member.__wrapped__),
        "name": function.__name__,
        "qualname": function.__qualname__,
        "signature": str(inspect.signature(member)),
        "defaults": repr(function.__defaults__),
        "keyword-only defaults": repr(function.__kwdefaults__),
        "annotations": repr(function.__annotations__),
        "closure": repr(function.__closure__),
        "docstring": function.__doc__,
        "file": code.co_filename,
        "first line": code.co_firstlineno,
        "name in the code": (code.co_name, getattr(code, "co_qualname", None)),
        "flags": code.co_flags,
        "arguments": code.co_varnames[: code.co_argcount],
        "source": inspect.getsource(function),
    }


def _looks_before_and_after() -> Any:
    module = _import_target()
    before, code = _looks(module), _function(module).__code__
    _register()
    return before, _looks(module), _function(module).__code__ is not code


def test_the_edited_function_looks_as_before(stock: ForkServer) -> None:
    before, after, edited = stock.run(_looks_before_and_after, **ON).value
    assert edited
    assert before["source"].startswith("    @torch.inference_mode()\n    def _dummy_run(")
    for name, value in before.items():
        assert after[name] == value, name


class _Here(Exception):
    pass


def _traceback_line(what_fails: str) -> Any:
    """Where a traceback through the fixed function points, and the text that it shows there."""
    module = _import_target()
    _register()
    runner = _runner()
    del runner.synchronize_input_prep
    runner.prepare_inputs_event = None
    fail = _raiser(_Here)
    if what_fails == "moved":
        runner.cudagraph_dispatcher = SimpleNamespace(dispatch=fail)
    elif what_fails == "unmoved before":
        module.coordinate_batch_across_dp = fail
    elif what_fails == "inserted":
        importlib.import_module("vllm_cgfix.fixes.dispatch_order").prepare_dummy_batch = fail
    elif what_fails == "unmoved after":
        runner.cudagraph_dispatcher = SimpleNamespace(
            dispatch=lambda *args: (module.CUDAGraphMode.NONE, None)
        )
        runner.maybe_dummy_run_with_lora = fail
    try:
        runner._dummy_run(1)
    except _Here as error:
        frame = next(
            frame
            for frame in traceback.extract_tb(error.__traceback__)
            if frame.name == "_dummy_run"
        )
        return frame.filename, frame.lineno, frame.line, module.__file__
    return None


@pytest.mark.parametrize(
    ("what_fails", "text"),
    [
        ("moved", "self.cudagraph_dispatcher.dispatch("),
        ("unmoved before", "ubatch_slices, num_tokens_across_dp = coordinate_batch_across_dp("),
        ("unmoved after", "with self.maybe_dummy_run_with_lora("),
        # New code has no line of its own: it shows the one in front of which it stands.
        ("inserted", "self.seq_lens.np[:num_reqs] = seq_lens"),
    ],
)
def test_a_traceback_names_the_file_and_the_line(
    stock: ForkServer, what_fails: str, text: str
) -> None:
    filename, number, line, file = stock.run(_traceback_line, what_fails, **ON).value
    assert filename == file
    assert line == text
    source = Path(filename).read_text().splitlines()
    start = source.index("    def _dummy_run(")
    assert number == next(
        number
        for number, found in enumerate(source, start=1)
        if number > start and found.strip() == text
    )


def _undone() -> Any:
    import vllm_cgfix

    module = _import_target()
    stock_code = _function(module).__code__
    found = []
    for fix in ("dispatch-order", None):
        _register()
        found.append((_fixed(), _state()))
        vllm_cgfix.undo(fix)
        found.append((_function(module).__code__ is stock_code, _fixed(), _state()))
    return found


def test_undo_gives_the_code_object_back_and_register_applies_again(stock: ForkServer) -> None:
    ended = stock.run(_undone, **ON)
    assert ended.value == [("fixed", "applied"), (True, "stock", "off")] * 2
    assert [bool(APPLIED.fullmatch(line)) for line in ended.log] == [False, True, True]


def _undone_before_the_import() -> Any:
    import vllm_cgfix

    _register()
    vllm_cgfix.undo("dispatch-order")
    _import_target()
    undone = _fixed(), _state()
    _register()
    return undone, (_fixed(), _state())


def test_undo_before_the_import(stock: ForkServer) -> None:
    undone, again = stock.run(_undone_before_the_import, **ON).value
    assert undone == ("stock", "off")
    assert again == ("fixed", "applied")


def _cycles(imported: bool) -> dict[str, list[int]]:
    """What is there after 20 and after 200 cycles of register and undo."""
    import wrapt.importer

    import vllm_cgfix

    if imported:
        _import_target()
    measured: dict[str, list[int]] = {"hooks": [], "finders": [], "blocks": [], "threads": []}
    for cycle in range(1, 201):
        _register()
        if imported:
            assert _state() == "applied"
        vllm_cgfix.undo()
        if cycle in (20, 200):
            hooks = [hook for hooks in wrapt.importer._post_import_hooks.values() for hook in hooks]
            measured["hooks"].append(len(hooks))
            measured["finders"].append(len(sys.meta_path))
            measured["blocks"].append(sys.getallocatedblocks())
            measured["threads"].append(threading.active_count())
    return measured


@pytest.mark.parametrize("imported", [True, False], ids=["imported", "pending"])
def test_200_cycles_of_register_and_undo_leak_nothing(stock: ForkServer, imported: bool) -> None:
    measured = stock.run(_cycles, imported, **ON).value
    blocks = measured.pop("blocks")
    for name, (early, late) in measured.items():
        assert early == late, name
    # One tree or code object kept from each cycle would be more than 10,000 blocks a cycle.
    assert blocks[1] - blocks[0] < 2000, f"{blocks[1] - blocks[0]} blocks more in 180 cycles"


# --- 3. whatever refers to the function ---------------------------------------------------------


def _references() -> Any:
    module = _import_target()
    alias = module.GPUModelRunner._dummy_run

    class Subclass(module.GPUModelRunner):  # type: ignore[name-defined,misc]
        def _dummy_run(self, *args: Any, **kwargs: Any) -> Any:
            return super()._dummy_run(*args, **kwargs)

    runner, of_subclass = _runner(), _runner(Subclass)
    bound = runner._dummy_run
    calls = {
        "alias": lambda: alias(runner, 1),
        "subclass": lambda: of_subclass._dummy_run(1),
        "bound method": lambda: bound(1),
        "partial": functools.partial(alias, runner, 1),
    }
    before = {name: _runs(call) for name, call in calls.items()}
    _register()
    return before, {name: _runs(call) for name, call in calls.items()}


@pytest.fixture(scope="module")
def references(stock: ForkServer) -> Any:
    return stock.run(_references, **ON).value


@pytest.mark.parametrize("name", ["alias", "subclass", "bound method", "partial"])
def test_what_was_taken_before_the_fix_is_fixed(references: Any, name: str) -> None:
    before, after = references
    assert before[name] == "stock"
    assert after[name] == "fixed"


# --- 4. other patchers --------------------------------------------------------------------------


def _other_dummy_run(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Another patcher's replacement."""


def _wrap_target() -> list[str]:
    """Wrap the function as a well-behaved patcher does; the list tells of the calls."""
    runner_class = _import_target().GPUModelRunner
    calls = []
    wrapped = runner_class._dummy_run

    @functools.wraps(wrapped)
    def other_patchers_wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append("other")
        return wrapped(self, *args, **kwargs)

    runner_class._dummy_run = other_patchers_wrapper
    return calls


def _replace_target() -> None:
    _import_target().GPUModelRunner._dummy_run = _other_dummy_run


def _swap_code_of_target() -> None:
    function = _function(_import_target())
    constants = tuple(
        "other" if isinstance(constant, str) and constant.startswith("Cudagraph") else constant
        for constant in function.__code__.co_consts
    )
    assert constants != function.__code__.co_consts
    function.__code__ = function.__code__.replace(co_consts=constants)


def _wrapped_before() -> Any:
    import vllm_cgfix

    calls = _wrap_target()
    stock_code = _function(_import_target()).__code__
    _register()
    fixed = _fixed(), _state(), str(_status()), list(calls)
    vllm_cgfix.undo()
    return fixed, _function(_import_target()).__code__ is stock_code, _fixed(), list(calls)


def test_wrapped_before_is_edited_beneath_and_the_log_names_the_wrapper(stock: ForkServer) -> None:
    ended = stock.run(_wrapped_before, **ON)
    (fixed, state, text, calls), is_stock, undone, all_calls = ended.value
    assert (fixed, state, calls) == ("fixed", "applied", ["other"])
    assert (is_stock, undone, all_calls) == (True, "stock", ["other", "other"])
    for told in (text, ended.log[1]):
        assert "beneath" in told
        assert __file__ in told, "the wrapper's file is not named"


def _patched_before(patch: Callable[[], object]) -> Any:
    patch()
    member = _import_target().GPUModelRunner.__dict__["_dummy_run"]
    code = inspect.unwrap(member).__code__
    _register()
    unchanged = (
        member is _import_target().GPUModelRunner.__dict__["_dummy_run"]
        and code is inspect.unwrap(member).__code__
    )
    return _state(), _status().reason, unchanged


@pytest.mark.parametrize(
    ("patch", "reason"),
    [
        (_replace_target, "_other_dummy_run"),
        (_swap_code_of_target, "running code of vllm.v1.worker.gpu_model_runner."),
    ],
    ids=["replaced", "code swapped"],
)
def test_patched_otherwise_before_is_refused(
    stock: ForkServer, patch: Callable[[], object], reason: str
) -> None:
    ended = stock.run(_patched_before, patch, **ON)
    state, told, unchanged = ended.value
    assert state == "refused"
    assert reason in told
    assert unchanged, "the other patch is no longer what it was"
    assert REFUSED.search(ended.log[-1])
    assert reason in ended.log[-1]


def test_replaced_before_names_where_the_replacement_is_from(stock: ForkServer) -> None:
    _, told, _ = stock.run(_patched_before, _replace_target, **ON).value
    assert __file__ in told


def _patched_after(patch: Callable[[], object]) -> Any:
    _register()
    _import_target()
    patch()
    return _state(), _status().reason, _fixed()


def test_wrapped_after_leaves_it_applied(stock: ForkServer) -> None:
    state, _, fixed = stock.run(_patched_after, _wrap_target, **ON).value
    assert (state, fixed) == ("applied", "fixed")


@pytest.mark.parametrize(
    "patch", [_replace_target, _swap_code_of_target], ids=["replaced", "code swapped"]
)
def test_patched_otherwise_after_is_lost(stock: ForkServer, patch: Callable[[], object]) -> None:
    state, reason, _ = stock.run(_patched_after, patch, **ON).value
    assert state == "lost"
    assert "replaced" in reason


def _reloaded() -> Any:
    import vllm_cgfix

    _register()
    module = _import_target()
    before = _state()
    importlib.reload(module)
    stock_code = _function(module).__code__
    lost = _state(), _fixed()
    _register()
    again = _state(), _fixed()
    vllm_cgfix.undo()
    return before, lost, again, _function(module).__code__ is stock_code


def test_a_reload_shows_as_lost_and_register_applies_again(stock: ForkServer) -> None:
    before, lost, again, is_stock = stock.run(_reloaded, **ON).value
    assert before == "applied"
    assert lost == ("lost", "stock")
    assert again == ("applied", "fixed")
    assert is_stock, "undo after a reload gives back the code object of the reloaded module"


def _imported_anew() -> Any:
    """The module is taken out of ``sys.modules`` and imported a second time."""
    _register()
    _import_target()
    del sys.modules[TARGET]
    _import_target()
    lost = _state(), _fixed()
    _register()
    return lost, (_state(), _fixed())


def test_a_second_import_shows_as_lost_and_register_applies_again(stock: ForkServer) -> None:
    lost, again = stock.run(_imported_anew, **ON).value
    assert lost == ("lost", "stock")
    assert again == ("applied", "fixed")


def _registered_and_imported() -> Any:
    """The state before and after the import, and what there is to say about it."""
    with contextlib.suppress(Exception):
        _register()
    decided = _state()
    module = _import_target()
    status = _status()
    return {
        "decided": decided,
        "state": _state(),
        "runs": _fixed(),
        "file": module.__file__,
        "reason": status.reason,
        "remedy": status.remedy,
        "notes": status.notes,
    }


def test_stale_bytecode_is_refused(changed: Overlay, overlay_server: ForkServer) -> None:
    stock_text = changed.read(TARGET_PATH)
    other_text = stock_text.replace(b"num_reqs = min(num_tokens, max_num_reqs)", b"num_reqs = 1")
    assert other_text != stock_text
    changed.write(TARGET_PATH, stock_text)
    file = changed.folder / TARGET_PATH
    code = compile(other_text, str(file), "exec", dont_inherit=True)
    import marshal

    stat = file.stat()
    changed.compiled(TARGET_PATH).write_bytes(
        importlib.util.MAGIC_NUMBER
        + struct.pack("<III", 0, int(stat.st_mtime), stat.st_size)
        + marshal.dumps(code)
    )
    found = overlay_server.run(_registered_and_imported, **ON).value
    assert found["decided"] == "pending", "the source file itself is stock"
    assert found["state"] == "refused"
    assert found["runs"] == "stock"
    assert "running code" in found["reason"]
    assert ".pyc" in found["reason"]


# --- 5. changed files ---------------------------------------------------------------------------


def test_unchanged_links_are_known(changed: Overlay, overlay_server: ForkServer) -> None:
    found = overlay_server.run(_registered_and_imported, **ON).value
    assert found["file"] == str(changed.folder / TARGET_PATH)
    assert (found["state"], found["runs"], found["notes"]) == ("applied", "fixed", [])


def one_byte_changed(content: bytes) -> bytes:
    """The same but for one letter of a comment."""
    return content.replace(b"# SPDX", b"# SPDx", 1)


@pytest.mark.parametrize("path", [TARGET_PATH, WITNESS_PATH], ids=["target", "witness"])
def test_a_file_changed_by_one_byte_is_refused(
    changed: Overlay, overlay_server: ForkServer, path: str
) -> None:
    content = one_byte_changed(changed.read(path))
    assert sum(a != b for a, b in zip(content, changed.read(path), strict=True)) == 1
    changed.write(path, content)
    ended = overlay_server.run(_registered_and_imported, **ON)
    found = ended.value
    assert (found["decided"], found["state"], found["runs"]) == ("refused", "refused", "stock")
    assert found["reason"].startswith("unknown source")
    assert path in found["reason"]
    for way_on in ("vllm-cgfix status", "upgrade", "unmodified", "VLLM_CGFIX_UNVERIFIED=1"):
        assert way_on in found["remedy"]
    assert len(ended.log) == 2, ended.log
    assert REFUSED.search(ended.log[1])
    assert path in ended.log[1]


@pytest.mark.parametrize("path", [TARGET_PATH, WITNESS_PATH], ids=["target", "witness"])
def test_a_missing_file_is_refused(changed: Overlay, overlay_server: ForkServer, path: str) -> None:
    changed.write(path, b"")
    (changed.folder / path).unlink()
    ended = overlay_server.run(_decided, **ON, VLLM_CGFIX_UNVERIFIED="0")
    state, reason = ended.value
    assert state == "refused"
    assert path in reason


def _decided() -> tuple[str, str]:
    _register()
    return _state(), _status().reason


@pytest.mark.parametrize("path", [TARGET_PATH, WITNESS_PATH], ids=["target", "witness"])
def test_unverified_applies_where_the_structure_is_the_same(
    changed: Overlay, overlay_server: ForkServer, path: str
) -> None:
    changed.write(path, one_byte_changed(changed.read(path)) + b"\n# A vendor's comment.\n")
    ended = overlay_server.run(_registered_and_imported, **ON, VLLM_CGFIX_UNVERIFIED="1")
    found = ended.value
    assert (found["decided"], found["state"], found["runs"]) == ("pending", "applied", "fixed")
    for told in (" ".join(found["notes"]), ended.log[1]):
        assert "unverified" in told
        assert path in told


def differing(content: bytes) -> bytes:
    """The same but for the structure of ``_dummy_run``, which works as before."""
    other = content.replace(
        b"attn_metadata: PerLayerAttnMetadata | None = None\n\n        # If force_attention",
        b"attn_metadata = None\n\n        # If force_attention",
    )
    assert other != content
    return other


def test_unverified_refuses_where_the_structure_differs(
    changed: Overlay, overlay_server: ForkServer
) -> None:
    changed.write(TARGET_PATH, differing(changed.read(TARGET_PATH)))
    found = overlay_server.run(_registered_and_imported, **ON, VLLM_CGFIX_UNVERIFIED="1").value
    assert (found["decided"], found["state"], found["runs"]) == ("pending", "refused", "stock")
    assert "structure differs in GPUModelRunner._dummy_run" in found["reason"]


def _changed_after_the_decision(file: str, content: bytes) -> Any:
    _register()
    decided = _state()
    os.unlink(file)
    Path(file).write_bytes(content)
    _import_target()
    return decided, _state(), _fixed(), _status().reason


def test_a_file_changed_between_decision_and_import_is_refused(
    changed: Overlay, overlay_server: ForkServer
) -> None:
    content = changed.read(TARGET_PATH)
    changed.write(TARGET_PATH, content)
    decided, state, runs, reason = overlay_server.run(
        _changed_after_the_decision,
        str(changed.folder / TARGET_PATH),
        one_byte_changed(content),
        **ON,
    ).value
    assert (decided, state, runs) == ("pending", "refused", "stock")
    assert "has changed since" in reason
    assert TARGET_PATH in reason


# --- 6. settings, STRICT, and faults of our own -------------------------------------------------


def _settings_errors() -> list[tuple[str, str]]:
    """What register() raises, three times over, and then what vLLM's own loading raises."""
    from vllm.plugins import load_general_plugins

    import vllm_cgfix

    errors = []
    for call in (*[vllm_cgfix.register] * 3, load_general_plugins):
        try:
            call()
            errors.append(("nothing", ""))
        except Exception as error:
            errors.append((type(error).__name__, str(error)))
    return errors


FIX_WORDS = ("0", "off", "1", "on", "all")


@pytest.mark.parametrize(
    ("variables", "valid"),
    [
        ({"VLLM_CGFIX": "dispach-order"}, (*FIX_WORDS, "dispatch-order")),
        ({"VLLM_CGFIX": "all,-nothing"}, (*FIX_WORDS, "dispatch-order")),
        ({"VLLM_CGFIX": "maybe"}, (*FIX_WORDS, "dispatch-order")),
        ({"VLLM_CGFIX": "0,all"}, FIX_WORDS),
        ({"VLLM_CGFIX": "all,,dispatch-order"}, FIX_WORDS),
        ({"VLLM_CGFIX": "-dispatch-order"}, ("all,-dispatch-order",)),
        ({"VLLM_CGFIX_STRICT": "perhaps"}, ("1", "on", "0", "off")),
        ({**ON, "VLLM_CGFIX_UNVERIFIED": "all"}, ("1", "on", "0", "off")),
        (
            {"VLLM_CGFIX_STRIKT": "1"},
            ("VLLM_CGFIX", "VLLM_CGFIX_STRICT", "VLLM_CGFIX_UNVERIFIED"),
        ),
    ],
    ids=lambda value: (
        ",".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else ""
    ),
)
def test_bad_settings_stop_the_start_on_every_call(
    stock: ForkServer, variables: dict[str, str], valid: tuple[str, ...]
) -> None:
    errors = stock.run(_settings_errors, **variables).value
    assert [name for name, _ in errors] == ["SettingsError"] * 4
    for _, message in errors:
        for name in variables:
            assert "VLLM_CGFIX" in name
        assert any(name in message for name in variables), message
        for word in valid:
            assert re.search(rf"(?<![\w-]){re.escape(word)}(?![\w-])", message), (word, message)


def _strict() -> Any:
    """What register() raises, twice; whether the import works; what the first call raises."""
    from vllm_cgfix.fix import FixRefused

    def attempt(call: Callable[[], object]) -> str:
        try:
            call()
        except FixRefused as error:
            return str(error)
        except (_BuildsMetadata, _BuildsNoMetadata):
            return "vLLM's code ran"
        return "nothing raised"

    registered = [attempt(_register), attempt(_register)]
    runner = _runner()
    called = [attempt(lambda: runner._dummy_run(1)), attempt(lambda: runner._dummy_run(1))]
    return registered, called, attempt(_register), callable(type(runner).execute_model)


def test_strict_stops_the_start_on_what_the_hashes_refuse(
    changed: Overlay, overlay_server: ForkServer
) -> None:
    changed.write(WITNESS_PATH, one_byte_changed(changed.read(WITNESS_PATH)))
    registered, called, _, _ = overlay_server.run(_strict, **ON, VLLM_CGFIX_STRICT="1").value
    for message in registered:
        assert "VLLM_CGFIX_STRICT=1" in message
        assert "dispatch-order" in message
        assert WITNESS_PATH in message
    assert called == ["vLLM's code ran"] * 2


def test_strict_does_not_stop_what_is_applied(stock: ForkServer) -> None:
    registered, called, again, _ = stock.run(_strict, **ON, VLLM_CGFIX_STRICT="1").value
    assert registered == ["nothing raised"] * 2
    assert called == ["vLLM's code ran"] * 2
    assert again == "nothing raised"


def test_strict_raises_at_the_first_call_of_what_the_import_refuses(
    changed: Overlay, overlay_server: ForkServer
) -> None:
    stock_text = changed.read(TARGET_PATH)
    changed.write(TARGET_PATH, differing(stock_text))
    registered, called, again, others = overlay_server.run(
        _strict, **ON, VLLM_CGFIX_STRICT="1", VLLM_CGFIX_UNVERIFIED="1"
    ).value
    assert registered == ["nothing raised"] * 2
    for message in (*called, again):
        assert "VLLM_CGFIX_STRICT=1" in message
        assert "structure differs" in message
    assert others, "the module's other functions are there"


def _faulty(where: str) -> Any:
    """Register, twice, and import, with one internal step broken."""
    module, _, path = where.partition(":")
    owner: Any = importlib.import_module(module)
    *owners, name = path.split(".")
    for part in owners:
        owner = getattr(owner, part)
    assert hasattr(owner, name), where
    setattr(owner, name, _raiser(RuntimeError, "injected"))
    raised = []
    for _ in range(2):
        try:
            _register()
        except Exception:
            raised.append(traceback.format_exc())
    _import_target()
    status = _status()
    return raised, _fixed(), _state(), status and status.reason


@pytest.mark.parametrize(
    "where",
    [
        "vllm_cgfix.installation:Installation.find",
        "vllm_cgfix.installation:Installation.sha256",
        "vllm_cgfix.installation:Installation.file",
        "vllm_cgfix.decision:ReleaseTable.load",
        "vllm_cgfix.decision:ReleaseTable.releases_with",
        "vllm_cgfix.decision:Decider.decide",
        "vllm_cgfix.code_edit:hashlib.sha256",
        "vllm_cgfix.code_edit:ast.parse",
        "vllm_cgfix.code_edit:ast.fix_missing_locations",
        "vllm_cgfix.code_edit:_compile",
        "vllm_cgfix.code_edit:_find_code",
        "vllm_cgfix.code_edit:_member",
        "vllm_cgfix.code_edit:matches",
        "vllm_cgfix.code_edit:unwrap",
        "vllm_cgfix.code_edit:SourceEditor.__init__",
        "vllm_cgfix.code_edit:SourceEditor.set_active",
        "wrapt:register_post_import_hook",
        "vllm_cgfix.imports:_wait_for_other_threads",
        "vllm_cgfix.plugin:when_imported",
    ],
)
def test_a_fault_of_our_own_breaks_nothing(stock: ForkServer, where: str) -> None:
    ended = stock.run(_faulty, where, **ON)
    raised, runs, state, reason = ended.value
    assert not raised, raised[0]
    assert (runs, state) == ("stock", "refused")
    assert "injected" in reason
    assert [line for line in ended.log if REFUSED.search(line) and "injected" in line]


def _without_wrapts_function() -> Any:
    import wrapt

    del wrapt.register_post_import_hook
    _register()
    return _fixed(), _state(), _status().reason


def test_a_wrapt_without_its_hooks_is_a_refusal(stock: ForkServer) -> None:
    runs, state, reason = stock.run(_without_wrapts_function, **ON).value
    assert (runs, state) == ("stock", "refused")
    assert "register_post_import_hook" in reason


def _without_module(name: str) -> Any:
    sys.modules[name] = None  # type: ignore[assignment]  # as import does where it is not there
    for module in [m for m in sys.modules if m.startswith("vllm_cgfix")]:
        del sys.modules[module]
    raised = []
    for _ in range(2):
        try:
            _register()
        except Exception:
            raised.append(traceback.format_exc())
    return raised, _fixed()


def test_a_missing_dependency_breaks_nothing(stock: ForkServer) -> None:
    ended = stock.run(_without_module, "wrapt", **ON)
    raised, runs = ended.value
    assert not raised, raised[0]
    assert runs == "stock"
    assert [line for line in ended.log if REFUSED.search(line) and "wrapt" in line]


def _with_table(text: str | None) -> Any:
    import vllm_cgfix.decision as decision

    class Table:
        def joinpath(self, name: str) -> Table:
            return self

        def read_text(self, encoding: str) -> str:
            if text is None:
                raise FileNotFoundError(2, "No such file or directory", "releases.json")
            return text

    decision.resources = SimpleNamespace(files=lambda package: Table())  # type: ignore[assignment]
    return _registered_and_imported()


_HASH = {"0" * 64: ["0.11.2"]}


@pytest.mark.parametrize(
    "text",
    [
        None,
        "",
        "{",
        "[]",
        "null",
        "{}",
        json.dumps({"releases": ["0.11.2"]}),
        json.dumps({"releases": ["0.11.2"], "files": []}),
        json.dumps({"releases": ["0.11.2"], "files": {TARGET_PATH: 5}}),
        json.dumps({"releases": ["0.11.2"], "files": {TARGET_PATH: {"0" * 64: None}}}),
        json.dumps({"releases": [], "files": {TARGET_PATH: _HASH}}),
    ],
)
def test_a_damaged_or_missing_table_is_a_refusal(stock: ForkServer, text: str | None) -> None:
    ended = stock.run(_with_table, text, **ON)
    found = ended.value
    assert (found["decided"], found["state"], found["runs"]) == ("refused", "refused", "stock")
    assert found["reason"]
    assert found["remedy"]
    assert "Traceback" not in ended.output


# A table whose hash is right but whose lists are not: the path that a damaged table takes least.
def _with_table_of_target(value: Any) -> Any:
    import hashlib

    file = Path(importlib.util.find_spec(TARGET).origin)  # type: ignore[union-attr,arg-type]
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    table = {"releases": ["0.11.2"], "files": {TARGET_PATH: {digest: value}}}
    return _with_table(json.dumps(table))


@pytest.mark.parametrize("value", [None, 5, [], ["0.0.0"], [[]]], ids=repr)
def test_a_damaged_row_is_a_refusal(stock: ForkServer, value: Any) -> None:
    found = stock.run(_with_table_of_target, value, **ON).value
    assert (found["decided"], found["state"], found["runs"]) == ("refused", "refused", "stock")
    assert found["reason"]


def test_an_unreadable_file_is_a_refusal_that_names_it(stock: ForkServer) -> None:
    ended = stock.run(_with_unreadable_target, **ON)
    state, reason = ended.value
    assert state == "refused"
    assert TARGET_PATH in reason
    assert "Permission denied" in reason


def _with_unreadable_target() -> tuple[str, str]:
    import vllm_cgfix.installation as installation

    def refuse(file: str, *args: Any, **kwargs: Any) -> Any:
        if file.endswith(TARGET_PATH):
            raise PermissionError(13, "Permission denied", file)
        return open(file, *args, **kwargs)

    installation.open = refuse  # type: ignore[attr-defined]
    return _decided()


# --- 7. vLLM's own table of variables -----------------------------------------------------------


def _import_variables() -> None:
    from vllm_cgfix.verify import cpu

    cpu.use_cpu_platform()
    importlib.import_module("vllm.plugins")
    importlib.import_module("vllm.config.utils")  # which compile_factors() imports


def _import_arguments() -> None:
    _import_variables()
    importlib.import_module("vllm.engine.arg_utils")


@pytest.fixture(scope="module")
def releases() -> Iterator[Callable[[str], ForkServer]]:
    """Warm processes of other releases; those with ``EngineArgs`` that check the variables."""
    servers: dict[str, ForkServer] = {}

    def server(release: str) -> ForkServer:
        if release not in servers:
            servers[release] = ForkServer(
                environment(release, **VARIABLES),
                _import_variables if release == "0.12.0" else _import_arguments,
            )
        return servers[release]

    yield server
    for each in servers.values():
        each.close()


SET = {
    "unset": {},
    "0": {"VLLM_CGFIX": "0"},
    "1": {"VLLM_CGFIX": "1"},
    "all three": {"VLLM_CGFIX": "1", "VLLM_CGFIX_STRICT": "0", "VLLM_CGFIX_UNVERIFIED": "0"},
    "only strict": {"VLLM_CGFIX_STRICT": "0"},
}


def _start_engine(hard_fail: bool) -> str:
    """Make the engine's configuration, as far as vLLM's check of the variables and no further."""
    import vllm.engine.arg_utils as arg_utils

    arg_utils.maybe_override_with_speculators = _raiser(_Here)  # called just after the check
    arguments = arg_utils.EngineArgs(model=os.getcwd(), fail_on_environ_validation=hard_fail)
    try:
        arguments.create_engine_config()
    except _Here:
        return "started"
    except ValueError as error:
        return str(error)
    return "the check was not reached"


@pytest.mark.parametrize("variables", SET.values(), ids=SET)
@pytest.mark.parametrize("release", ["0.20.0", "0.33.0"])
def test_vllm_neither_stops_nor_warns_on_the_variables(
    releases: Callable[[str], ForkServer], release: str, variables: dict[str, str]
) -> None:
    assert releases(release).run(_start_engine, True, **variables).value == "started"
    ended = releases(release).run(_start_engine, False, **variables)
    assert ended.value == "started"
    assert "Unknown vLLM environment variable" not in ended.output


@pytest.mark.parametrize("release", ["0.20.0", "0.33.0"])
def test_vllm_would_stop_and_warn_without_the_plugin(
    releases: Callable[[str], ForkServer], release: str
) -> None:
    without = {"VLLM_CGFIX": "0", "VLLM_PLUGINS": "no-plugin"}
    stopped = releases(release).run(_start_engine, True, **without).value
    assert "Unknown vLLM environment variable detected: VLLM_CGFIX" in stopped
    warned = releases(release).run(_start_engine, False, **without).output
    assert "Unknown vLLM environment variable detected: VLLM_CGFIX" in warned


def _variables_known() -> Any:
    from vllm import envs
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    names = ("VLLM_CGFIX", "VLLM_CGFIX_STRICT", "VLLM_CGFIX_UNVERIFIED")
    return [name for name in names if name in envs.environment_variables]


@pytest.mark.parametrize("release", ["0.12.0", "0.20.0", "0.33.0"])
@pytest.mark.parametrize("variables", SET.values(), ids=SET)
def test_the_variables_are_in_vllms_table_if_any_is_set(
    releases: Callable[[str], ForkServer], release: str, variables: dict[str, str]
) -> None:
    known = releases(release).run(_variables_known, **variables).value
    assert len(known) == (3 if variables else 0)


def _ray_copies() -> Any:
    from vllm.ray.ray_env import get_env_vars_to_copy

    _register()
    return sorted(name for name in get_env_vars_to_copy() if name.startswith("VLLM_CGFIX"))


@pytest.mark.parametrize("value", ["0", "1"])
def test_ray_workers_of_0_11_get_the_variables(stock: ForkServer, value: str) -> None:
    copied = stock.run(_ray_copies, VLLM_CGFIX=value).value
    assert copied == ["VLLM_CGFIX", "VLLM_CGFIX_STRICT", "VLLM_CGFIX_UNVERIFIED"]


def _compile_factors(text: str, strict: str) -> Any:
    os.environ.update(VLLM_CGFIX=text, VLLM_CGFIX_STRICT=strict)
    _use_fixes(_test_fix("one", {TARGET: (ONE,)}), _test_fix("two", {TARGET: (TWO,)}))
    _register()
    return importlib.import_module("vllm.envs").compile_factors()


@pytest.mark.parametrize("release", ["0.12.0", "0.33.0"])
def test_equal_sets_of_fixes_share_a_compile_cache(
    releases: Callable[[str], ForkServer], release: str
) -> None:
    def factors(text: str, strict: str = "0") -> Any:
        return releases(release).run(_compile_factors, text, strict).value

    both = factors("1")
    assert both["VLLM_CGFIX"] == "one,two"
    for text, strict in (("all", "1"), ("two,one", "0"), (" ONE , two", "1"), ("one,all", "0")):
        assert factors(text, strict) == both, text
    one = factors("one")
    assert one == {**both, "VLLM_CGFIX": "one"}
    assert factors("all,-two", "1") == one
    assert factors("0") == {**both, "VLLM_CGFIX": ""}


# --- 8. what register() costs -------------------------------------------------------------------

_COUNT_MODULES = """
import sys
import vllm_cgfix
before = set(sys.modules)
vllm_cgfix.register()
print(*sorted(set(sys.modules) - before))
"""


@pytest.mark.parametrize("variables", [{}, {"VLLM_CGFIX": "0"}], ids=["unset", "0"])
def test_off_imports_next_to_nothing(variables: dict[str, str]) -> None:
    added = run_python(_COUNT_MODULES, environment("0.11.2", **variables)).stdout.split()
    assert len(added) <= 3, added
    assert not [name for name in added if name.split(".")[0] in ("vllm", "torch")]


_COUNT_CUDA = """
import sys
import torch
touched = []
torch.cuda._lazy_init = lambda: touched.append("CUDA was to be initialised")
import vllm.plugins
import vllm.logger
before = set(sys.modules)
vllm.plugins.load_general_plugins()
import json
import vllm_cgfix
print(json.dumps({s.fix.id: s.state.value for s in vllm_cgfix.status()}))
print(torch.cuda.is_initialized(), touched)
print(*sorted(set(sys.modules) - before))
"""


def test_on_imports_nothing_of_vllm_and_leaves_cuda_alone() -> None:
    found, cuda, added = run_python(
        _COUNT_CUDA, environment("0.11.2", **VARIABLES, VLLM_CGFIX="all")
    ).stdout.splitlines()[-3:]
    assert json.loads(found) == states_with_all("0.11.2", "pending")
    assert cuda == "False []"
    assert "vllm_cgfix.plugin" in added.split()
    assert not [name for name in added.split() if name.split(".")[0] in ("vllm", "torch")]


# --- 9. several modules, several fixes ----------------------------------------------------------

SECOND = "vllm.v1.core.sched.scheduler"
ONE = EditFunction(
    "GPUModelRunner._dummy_run", (Insert("one = 1", before="attn_metadata: ... = None"),)
)
TWO = EditFunction(
    "GPUModelRunner._dummy_run", (Insert("two = 2", after="attn_metadata: ... = None"),)
)
OF_SECOND = EditFunction(
    "Scheduler.get_num_unfinished_requests",
    (Insert("second = 2", before="return len(self.waiting) + len(self.running)"),),
)
REFUSING = EditFunction(
    "Scheduler.get_num_unfinished_requests",
    (
        Insert("second = 2", before="return len(self.waiting) + len(self.running)"),
        Insert("never = 3", before="this_is_not_there()"),
    ),
)


def _test_fix(
    name: str, edits: dict[str, tuple[EditFunction, ...]], *, separate: bool = False
) -> Fix:
    return Fix(
        id=name,
        title="",
        symptom="",
        error_patterns=(),
        upstream=(),
        scope="test",
        releases=("here",),
        edits=edits,
        separate=separate,
    )


def _use_fixes(*fixes: Fix) -> None:
    """Make these the catalogue of this process, needed on the release that is here."""
    import vllm_cgfix.fixes
    from vllm_cgfix.decision import ReleaseTable
    from vllm_cgfix.installation import Installation

    assert "vllm_cgfix.plugin" not in sys.modules
    vllm_cgfix.fixes.CATALOGUE = fixes
    here = Installation.find()
    paths = {path for fix in fixes for path in fix.edited_files}
    table = ReleaseTable(("here",), {path: {here.sha256(path) or "": ["here"]} for path in paths})
    ReleaseTable.load = classmethod(lambda cls: table)  # type: ignore[assignment,method-assign]


def _states() -> dict[str, str]:
    return {s.fix.id: s.state.value for s in importlib.import_module("vllm_cgfix").status()}


def _inserted(module: str, qualname: str) -> list[str]:
    """Which of the names that the test-made fixes insert are in the live function."""
    member = functools.reduce(getattr, qualname.split("."), importlib.import_module(module))
    code: CodeType = inspect.unwrap(member).__code__  # type: ignore[attr-defined,arg-type]
    return [name for name in ("one", "two", "second", "never") if name in code.co_varnames]


def _two_modules(edit_of_second: EditFunction, order: list[str]) -> Any:
    _use_fixes(_test_fix("both", {TARGET: (ONE,), SECOND: (edit_of_second,)}))
    events = []
    for event in order:
        if event == "register":
            _register()
        else:
            importlib.import_module(event)
        events.append(_states().get("both"))
    again = None
    _register()
    again = _states()["both"]
    code = [_inserted(TARGET, ONE.qualname), _inserted(SECOND, OF_SECOND.qualname)]
    return events, again, code, importlib.import_module("vllm_cgfix").status()[0].reason


ORDERS = [list(order) for order in itertools.permutations(("register", TARGET, SECOND))]


@pytest.mark.parametrize("order", ORDERS, ids=lambda o: ",".join(n.split(".")[-1] for n in o))
def test_a_fix_of_two_modules_leaves_no_trace_where_one_refuses(
    stock: ForkServer, order: list[str]
) -> None:
    events, again, code, reason = stock.run(_two_modules, REFUSING, order, VLLM_CGFIX="all").value
    assert code == [[], []]
    assert (events[-1], again) == ("refused", "refused")
    assert "this_is_not_there()" in reason


@pytest.mark.parametrize("order", ORDERS, ids=lambda o: ",".join(n.split(".")[-1] for n in o))
def test_a_fix_of_two_modules_is_applied_once_both_are_imported(
    stock: ForkServer, order: list[str]
) -> None:
    ended = stock.run(_two_modules, OF_SECOND, order, VLLM_CGFIX="all")
    events, again, code, _ = ended.value
    assert code == [["one"], ["second"]]
    assert (events[-1], again) == ("applied", "applied")
    assert len([line for line in ended.log if "both applied" in line]) == 1


def _two_separate_modules(edit_of_second: EditFunction, order: list[str]) -> Any:
    _use_fixes(_test_fix("both", {TARGET: (ONE,), SECOND: (edit_of_second,)}, separate=True))
    functions = {TARGET: ONE.qualname, SECOND: OF_SECOND.qualname}
    events = []
    for event in order:
        if event == "register":
            _register()
        else:
            importlib.import_module(event)
        found = [_inserted(*item) for item in functions.items() if item[0] in sys.modules]
        events.append((_states().get("both"), [*itertools.chain(*found)]))
    return events


@pytest.mark.parametrize("order", ORDERS, ids=lambda o: ",".join(n.split(".")[-1] for n in o))
def test_a_separate_fix_is_applied_once_the_imported_ones_are(
    stock: ForkServer, order: list[str]
) -> None:
    ended = stock.run(_two_separate_modules, OF_SECOND, order, VLLM_CGFIX="all")
    for number, found in enumerate(ended.value, start=1):
        so_far = order[:number]
        if "register" not in so_far:
            assert found == (None, [])
        else:
            inserted = {TARGET: "one", SECOND: "second"}
            expected = [name for module, name in inserted.items() if module in so_far]
            assert found == ("applied" if expected else "pending", expected)
    assert len([line for line in ended.log if "both applied" in line]) == 1


@pytest.mark.parametrize("order", ORDERS, ids=lambda o: ",".join(n.split(".")[-1] for n in o))
def test_a_separate_fix_leaves_no_trace_where_one_refuses(
    stock: ForkServer, order: list[str]
) -> None:
    events = stock.run(_two_separate_modules, REFUSING, order, VLLM_CGFIX="all").value
    assert events[-1] == ("refused", [])


def _separate_with_one_undone_and_reloaded() -> Any:
    import vllm_cgfix

    _use_fixes(_test_fix("both", {TARGET: (ONE,), SECOND: (OF_SECOND,)}, separate=True))
    _register()
    module = _import_target()
    importlib.reload(module)
    lost = _states()["both"]
    _register()
    again = _states()["both"]
    vllm_cgfix.undo("both")
    importlib.import_module(SECOND)
    code = [_inserted(TARGET, ONE.qualname), _inserted(SECOND, OF_SECOND.qualname)]
    return lost, again, _states()["both"], code


def test_a_separate_fix_is_lost_and_undone_with_the_one_module_that_is_there(
    stock: ForkServer,
) -> None:
    found = stock.run(_separate_with_one_undone_and_reloaded, VLLM_CGFIX="all").value
    assert found == ("lost", "applied", "off", [[], []])


def _one_refused_of_two() -> Any:
    """Of two fixes on the same modules, the second is refused in the second module."""
    _use_fixes(
        _test_fix("good", {TARGET: (ONE,), SECOND: (OF_SECOND,)}),
        _test_fix("bad", {TARGET: (TWO,), SECOND: (REFUSING,)}),
    )
    _register()
    importlib.import_module(TARGET)
    importlib.import_module(SECOND)
    return _states(), _inserted(TARGET, ONE.qualname), _inserted(SECOND, OF_SECOND.qualname)


def test_a_refused_fix_does_not_take_another_one_with_it(stock: ForkServer) -> None:
    states, of_target, of_second = stock.run(_one_refused_of_two, VLLM_CGFIX="all").value
    assert states == {"good": "applied", "bad": "refused"}
    assert (of_target, of_second) == (["one"], ["second"])


def _withdrawn_beside_a_foreign_change() -> Any:
    """A fix is refused in its second module after somebody has changed what another fix edits."""
    other = EditFunction(
        "GPUModelRunner.reset_mm_cache", (Insert("two = 2", before="if self.mm_budget: ..."),)
    )
    _use_fixes(
        _test_fix("other", {TARGET: (other,)}),
        _test_fix("both", {TARGET: (ONE,), SECOND: (REFUSING,)}),
    )
    _register()
    module = _import_target()
    before = _states()
    module.GPUModelRunner.reset_mm_cache = _other_dummy_run
    importlib.import_module(SECOND)
    return before, _states(), _inserted(TARGET, ONE.qualname)


def test_a_fix_is_withdrawn_whatever_became_of_another(stock: ForkServer) -> None:
    before, after, inserted = stock.run(_withdrawn_beside_a_foreign_change, VLLM_CGFIX="all").value
    assert before == {"other": "applied", "both": "pending"}
    assert after == {"other": "lost", "both": "refused"}
    assert inserted == []


def _composed() -> Any:
    """Two fixes of one function: the code after each order, and after undoing in each order."""
    import vllm_cgfix

    _use_fixes(_test_fix("one", {TARGET: (ONE,)}), _test_fix("two", {TARGET: (TWO,)}))
    function = _function(_import_target())
    stock_code = function.__code__
    together = []
    restored = []
    applying = (("one,two",), ("one", "one,two"), ("two", "one,two"), ("one", "two"))
    undoing = (("one", "two"), ("two", "one"), ("one", "two"), (None,))
    for applied, undone in zip(applying, undoing, strict=True):
        for words in applied:
            os.environ["VLLM_CGFIX"] = words
            _register()
        together.append((function.__code__, _inserted(TARGET, ONE.qualname), _states()))
        left = []
        for fix in undone:
            vllm_cgfix.undo(fix)
            left.append(_inserted(TARGET, ONE.qualname))
        restored.append((function.__code__ is stock_code, left[:-1], _states()))
    equal = all(code == together[0][0] for code, _, _ in together)
    return equal, [rest for _, *rest in together], restored


def test_two_fixes_of_one_function_compose_in_any_order(stock: ForkServer) -> None:
    equal, together, restored = stock.run(_composed).value
    assert equal, "the code depends on the order"
    assert together == [[["one", "two"], {"one": "applied", "two": "applied"}]] * 4
    after_first_undo = [[["two"]], [["one"]], [["two"]], []]
    for (is_stock, left, states), expected in zip(restored, after_first_undo, strict=True):
        assert is_stock
        assert left == expected
        assert states == {"one": "off", "two": "off"}
