"""Scenarios in the life of a process: each runs in a process of its own, forked from a warm one.

Importing vLLM costs seconds, and most scenarios differ only in what happens around the import of
one module. A :class:`ForkServer` is a process that has imported everything *but* that module; it
forks once for each scenario, and the fork runs one function of the tests::

    server = ForkServer(environment("0.11.2"), import_all_but_target)
    ended = server.run(function, argument, VLLM_CGFIX="1")

The function's result comes back, and what the process wrote.
"""

from __future__ import annotations

import ast
import faulthandler
import gc
import importlib
import importlib.util
import os
import pickle
import shutil
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from .process import environment
from .sources import source_dir

TARGET = "vllm.v1.worker.gpu_model_runner"
TARGET_PATH = "vllm/v1/worker/gpu_model_runner.py"

_ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Ended:
    """A process that has ended: what its function returned, and what it wrote."""

    value: Any
    output: str

    @property
    def log(self) -> list[str]:
        """The log lines of the plugin, as written."""
        return [line for line in self.output.splitlines() if "vllm-cgfix" in line]


def run_in_fork(function: Callable[..., Any], *arguments: Any, timeout: float = 300) -> Ended:
    """Run a function in a fork of this process and wait for its end.

    The function must return plain data. A fork that takes too long writes the stacks of all
    its threads and exits: a deadlock shows where it is.

    Raises:
        AssertionError: it raised, or did not end in time.
    """
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as result:
        sys.stdout.flush()
        sys.stderr.flush()
        # Its thread would be missing in the fork, which then waits for it.
        faulthandler.cancel_dump_traceback_later()
        pid = os.fork()
        if pid == 0:
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
            faulthandler.dump_traceback_later(timeout, exit=True)
            exit_code = 1
            try:
                result.write(pickle.dumps(function(*arguments)))
                result.flush()
                exit_code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(exit_code)
        _, status = os.waitpid(pid, 0)
        output.seek(0)
        text = output.read().decode(errors="replace")
        assert status == 0, f"{function.__name__} ended with status {status}:\n{text}"
        result.seek(0)
        return Ended(pickle.loads(result.read()), text)


class ForkServer:
    """A warm process that forks once for each scenario."""

    def __init__(self, environment: Mapping[str, str], prepare: Callable[[], None]):
        """Start it, and have it call ``prepare``, which is where it gets warm."""
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-c"),
                    f"from tests.releases.scenarios import serve; serve({theirs.fileno()})",
                ],
                env=dict(environment),
                cwd=_ROOT,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )
        self._connection = Connection(ours.detach())
        self._ask(prepare, (), {})

    def run(self, function: Callable[..., Any], *arguments: Any, **variables: str) -> Ended:
        """Run a function in a fork that has these environment variables.

        Raises:
            AssertionError: it raised, or did not end in time.
        """
        return self._ask(function, arguments, variables)

    def _ask(self, function: Callable[..., Any], arguments: Any, variables: Any) -> Ended:
        self._connection.send_bytes(pickle.dumps((function, arguments, variables)))
        try:
            answer = self._connection.recv()
        except EOFError:
            raise AssertionError(f"the process that {function.__name__} needs is gone") from None
        if isinstance(answer, str):
            raise AssertionError(answer)
        assert isinstance(answer, Ended)
        return answer

    def close(self) -> None:
        """End it."""
        self._connection.close()
        self._process.wait(30)


def server_of_each(releases: Iterable[str], prepare: Callable[[], None]) -> Any:
    """A fixture: each release, and a :class:`ForkServer` on its sources.

    Tests of one release are run by one worker, which pays for one server.
    """
    each = [pytest.param(release, marks=pytest.mark.xdist_group(release)) for release in releases]

    @pytest.fixture(scope="module", params=each)
    def server(request: pytest.FixtureRequest) -> Iterator[tuple[str, ForkServer]]:
        started = ForkServer(environment(request.param), prepare)
        yield request.param, started
        started.close()

    return server


def serve(socket_number: int) -> None:
    """What a :class:`ForkServer`'s process does: prepare, then fork for each request."""
    connection = Connection(socket_number)
    prepare, _, _ = pickle.loads(connection.recv_bytes())
    prepare()
    # A collection in a fork would touch, and so copy, all that this process holds.
    gc.collect()
    gc.freeze()
    connection.send(Ended(None, ""))
    while True:
        try:
            request = connection.recv_bytes()
        except EOFError:
            os._exit(0)  # taking down a process of this size takes seconds
        try:
            connection.send(run_in_fork(_answer, request))
        except AssertionError as error:
            connection.send(str(error))


def _answer(request: bytes) -> Any:
    function, arguments, variables = pickle.loads(request)
    os.environ.update(variables)
    return function(*arguments)


def import_all_but_target() -> None:
    """Import all that the V1 model runner imports, on the CPU platform, and not itself."""
    from vllm_cgfix.verify import cpu

    cpu.use_cpu_platform()
    spec = importlib.util.find_spec(TARGET)
    assert spec is not None
    assert spec.origin is not None
    namespace = {"__name__": TARGET, "__package__": TARGET.rpartition(".")[0]}
    for node in ast.parse(Path(spec.origin).read_bytes()).body:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            exec(compile(ast.Module([node], []), spec.origin, "exec"), namespace)
    assert TARGET not in sys.modules, "something else imports the target: no scenario can be first"


class Overlay:
    """The sources of a release as links, so that single files can be replaced."""

    def __init__(self, release: str, folder: Path):
        """Make the links in ``folder``, which must not exist yet."""
        self.folder = folder
        self._stock = source_dir(release)
        self._changed: set[str] = set()
        shutil.copytree(self._stock, folder, copy_function=os.symlink)

    def read(self, path: str) -> bytes:
        """The stock content of a file."""
        return (self._stock / path).read_bytes()

    def write(self, path: str, content: bytes) -> None:
        """Replace a file; its compiled form goes with it."""
        self._remove(path)
        (self.folder / path).write_bytes(content)
        self._changed.add(path)

    def compiled(self, path: str) -> Path:
        """Where Python keeps the compiled form of a file."""
        return Path(importlib.util.cache_from_source(str(self.folder / path)))

    def _remove(self, path: str) -> None:
        for file in (self.folder / path, self.compiled(path)):
            file.unlink(missing_ok=True)

    def restore(self) -> None:
        """Put the links back."""
        for path in self._changed:
            self._remove(path)
            (self.folder / path).symlink_to(self._stock / path)
        self._changed.clear()
