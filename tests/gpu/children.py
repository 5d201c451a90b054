"""Fresh child processes, several at once, each run once a session, results kept as they come.

Device time is short and start-up is long: one child makes every observation of its combination of
release, backend and plugin, and each claim is a test on the child's report. Children that share
the GPU run at the same time; whatever is timed belongs into ``tests/bench/gpu``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from . import machine

JOBS = "CGFIX_GPU_JOBS"
"""How many children share the GPU."""
DEADLINE = "CGFIX_GPU_DEADLINE"
"""Seconds after which no further child is started."""
OUT = "OUT"
"""The folder for results-VERSION.json, table-VERSION.txt and logs-VERSION.tar.gz."""

_TAIL = 20000


@dataclasses.dataclass(frozen=True)
class Child:
    """One child process.

    Attributes:
        name: unique; ends in ``stock`` or ``plugin`` where it is one of a pair.
        module: what ``python -m`` runs.
        arguments: its arguments.
        fix: the fix that is switched on; None for stock.
        timeout: seconds until it is killed.
        environ: more environment variables.
        reports: whether it writes a JSON report (else its exit code and log are the result).
    """

    name: str
    module: str
    arguments: tuple[str, ...] = ()
    fix: str | None = None
    timeout: float = 240
    environ: Mapping[str, str] = dataclasses.field(default_factory=dict)
    reports: bool = True


@dataclasses.dataclass(frozen=True)
class Result:
    """What became of a child.

    Attributes:
        name: the child's.
        status: ``ok``, ``failed`` (another exit code than 0), ``timeout`` or ``not run``.
        exit_code: None if it was killed for time or not run.
        seconds: how long it ran.
        report: what it had reported when it ended; empty if nothing.
        tail: the end of its output.
    """

    name: str
    status: str
    exit_code: int | None = None
    seconds: float = 0.0
    report: dict[str, Any] = dataclasses.field(default_factory=dict)
    tail: str = ""

    @property
    def ok(self) -> bool:
        """Whether it came to its own end."""
        return self.status == "ok"

    def summary(self) -> str:
        """What it reported in one line: its result, or how far it came."""
        for key in ("hang", "error", "summary"):
            if key in self.report:
                return str(self.report[key])
        last = self.tail.strip().rpartition("\n")[2]
        return f"in phase {self.report['phase']!r}: {last}" if "phase" in self.report else last

    def why(self) -> str:
        """One line on what went wrong."""
        return f"{self.name}: {self.status} after {self.seconds:.0f} s: {self.summary()}"


def environment(child: Child, cache: Path, index: int) -> dict[str, str]:
    """The environment of a child: nothing of ours but what the child asks for."""
    variables = {k: v for k, v in os.environ.items() if not k.startswith("VLLM_CGFIX")}
    variables.pop("PYTHONDONTWRITEBYTECODE", None)
    folder = machine.import_folder(with_plugin=child.fix is not None)
    variables["PYTHONPATH"] = os.pathsep.join(
        filter(None, [str(folder), variables.get("PYTHONPATH", "")])
    )
    variables |= {
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "2",
        "PYTHONFAULTHANDLER": "1",
        "PYTHONUNBUFFERED": "1",
        "VLLM_CACHE_ROOT": str(cache),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_NO_USAGE_STATS": "1",
        # Its own range of ports for each: two that look for a free one at once may find the same.
        "VLLM_PORT": str(21000 + 50 * index),
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
    }
    if child.fix is None:
        variables["VLLM_PLUGINS"] = ""
    else:
        variables.pop("VLLM_PLUGINS", None)
        variables |= {"VLLM_CGFIX": child.fix, "VLLM_CGFIX_STRICT": "1"}
    return variables | dict(child.environ)


class Children:
    """Starts children in the order in which they are asked for, and hands out their results."""

    def __init__(self, out: Path | None = None, jobs: int | None = None):
        self.folder = Path(tempfile.mkdtemp(prefix="cgfix-children-"))
        self.out = out or Path(os.environ.get(OUT) or self.folder)
        self.jobs = jobs or int(os.environ.get(JOBS, "8"))
        self.started = time.monotonic()
        self.deadline = float(os.environ.get(DEADLINE, "inf"))
        self.results: dict[str, Result] = {}
        self._futures: dict[str, Future[Result]] = {}
        self._pool = ThreadPoolExecutor(self.jobs)
        self._lock = threading.Lock()

    def start(self, children: Iterable[Child]) -> None:
        """Queue children that have not been queued before."""
        for child in children:
            if child.name not in self._futures:
                self._futures[child.name] = self._pool.submit(self._run, child, len(self._futures))

    def result(self, name: str) -> Result:
        """Wait for a child that was queued.

        Raises:
            KeyError: it was not.
        """
        return self._futures[name].result()

    def close(self) -> None:
        """Let what is running come to its end, and start nothing more."""
        self.deadline = 0
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _run(self, child: Child, index: int) -> Result:
        if time.monotonic() - self.started > self.deadline:
            result = Result(child.name, "not run", tail="the time for starting children was over")
        else:
            folder = self.folder / child.name
            result = run(child, folder, index, shared=self.jobs > 1)
            # Compiled graphs of one child are of no use to another.
            shutil.rmtree(folder / "cache", ignore_errors=True)
        self._keep(result)
        return result

    def _keep(self, result: Result) -> None:
        """Write everything known so far: the machine may be taken away at any time."""
        with self._lock:
            self.results[result.name] = result
            write_results(self.out, self.results, self.folder)


def run(child: Child, folder: Path, index: int = 0, *, shared: bool = False) -> Result:
    """Run one child to its end, in a folder of its own.

    Args:
        child: what to run.
        folder: made here; gets ``log`` and ``report.json``.
        index: tells children apart that run at the same time.
        shared: whether others use the GPU meanwhile.
    """
    folder.mkdir(parents=True, exist_ok=True)
    report = folder / "report.json"
    report.unlink(missing_ok=True)
    variables = environment(child, folder / "cache", index)
    command = [sys.executable, "-P", "-m", child.module, *child.arguments]
    if child.reports:
        command += ["--report", str(report)] + (["--shared-gpu"] if shared else [])
    begin = time.monotonic()
    exit_code: int | None
    with (folder / "log").open("ab") as log:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            exit_code = process.wait(child.timeout)
        except subprocess.TimeoutExpired:
            exit_code = None
        # An engine that crashed may leave compilers behind; they are in the child's session.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    status = "timeout" if exit_code is None else "failed" if exit_code else "ok"
    return Result(
        child.name,
        status,
        exit_code,
        round(time.monotonic() - begin, 1),
        json.loads(report.read_text()) if report.exists() else {},
        (folder / "log").read_text(errors="replace")[-_TAIL:],
    )


def write_results(out: Path, results: Mapping[str, Result], logs: Path) -> None:
    """Write results, a table of them and the logs, as three files."""
    out.mkdir(parents=True, exist_ok=True)
    version = machine.vllm_version() or "none"
    everything = {
        "machine": machine.describe(),
        "children": {name: dataclasses.asdict(result) for name, result in results.items()},
    }
    (out / f"results-{version}.json").write_text(json.dumps(everything, indent=1, default=str))
    (out / f"table-{version}.txt").write_text(table(results))
    with tarfile.open(out / f"logs-{version}.tar.gz", "w:gz", compresslevel=3) as archive:
        for name in results:
            log = logs / name / "log"
            if log.exists():
                # As it is now: other children are still writing to theirs.
                content = log.read_bytes()[-2_000_000:]
                member = tarfile.TarInfo(f"{name}.log")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))


def table(results: Mapping[str, Result]) -> str:
    """One line a child, for a reader."""
    width = max((len(name) for name in results), default=4)
    lines = [f"{'child':{width}}  status   seconds  summary"]
    for name, result in results.items():
        summary = result.summary()[:200].replace("\n", " ")
        lines.append(f"{name:{width}}  {result.status:7}  {result.seconds:7.1f}  {summary}")
    return "\n".join(lines) + "\n"
