"""Starts a real engine in an environment, and gathers what it answered, logged and did."""

from __future__ import annotations

import json
import re
import subprocess
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.installs.environments import ENGINE_RELEASE, Environment, replace
from tests.needs import functions, modules, needed
from vllm_cgfix.fix import Fix

from . import generate

FIXES = needed(ENGINE_RELEASE)
FUNCTIONS = {fix.id: functions(fix, ENGINE_RELEASE) for fix in FIXES}
"""What each of them edits: module to qualified names."""
VARIABLES = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "INFO",
    # Functions are sent to the workers, for them to describe themselves.
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
    "VLLM_DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "CGFIX_TEST_TARGETS": ",".join(modules(FIXES)),
}
ONE_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
OPTIONS = {"max_model_len": 128, "max_num_seqs": 4, "enforce_eager": True}
_LINE = re.compile(r"^\((?P<process>\S+) pid=(?P<pid>\d+)\) (?P<level>[A-Z]+) .*?\] (?P<text>.*)")


@dataclass(frozen=True)
class Run:
    """An engine that has ended.

    Attributes:
        tokens: the completion of each prompt.
        main, workers: what these processes said of themselves, see ``generate.describe``.
        output: all that was written.
        log: process id to the plugin's lines in vLLM's log, level and text.
        events: process id to what the witness recorded of that process, in order.
    """

    tokens: list[list[int]]
    main: dict[str, Any]
    workers: list[dict[str, Any]]
    output: str
    log: dict[int, list[str]]
    events: dict[int, list[str]]

    @property
    def loaded_plugins(self) -> set[int]:
        """The processes in which vLLM loaded its plugins."""
        return {pid for pid, events in self.events.items() if "plugins" in events}

    def applied(self, pid: int) -> list[Fix]:
        """The needed fixes all of whose modules a process has imported, itself or by fork."""
        return applied(self.events, pid)


def applied(events: dict[int, list[str]], pid: int) -> list[Fix]:
    """The needed fixes that must be applied in a process, by what the witness recorded."""

    def imported(pid: int) -> set[str]:
        found = set()
        for event in events[pid]:
            word, _, rest = event.partition(" ")
            found |= {rest} if word == "import" else set()
            found |= imported(int(rest)) if word == "fork" else set()
        return found

    names = imported(pid)
    return [
        fix
        for fix in FIXES
        if (any if fix.separate else all)(module in names for module in fix.edits)
    ]


def logged(output: str) -> dict[int, list[str]]:
    """Process id to the plugin's lines in vLLM's log, level and text."""
    found: dict[int, list[str]] = defaultdict(list)
    for line in output.splitlines():
        match = _LINE.match(line)
        if match and "vllm-cgfix" in match["text"]:
            found[int(match["pid"])].append(f"{match['level']} {match['text']}")
    return dict(found)


def recorded(file: Path) -> dict[int, list[str]]:
    """Process id to the events in a file of the witness."""
    found: dict[int, list[str]] = defaultdict(list)
    for line in file.read_text().splitlines() if file.exists() else ():
        pid, _, event = line.partition(" ")
        found[int(pid)].append(event)
    return dict(found)


def install_witness(environment: Environment) -> None:
    """Have each process of an environment record what it does."""
    module = Path(__file__).parent / "witness" / "cgfix_witness.py"
    site_packages = environment.site_packages
    metadata = site_packages / "cgfix_witness-0.dist-info"
    metadata.mkdir()
    for file, text in {
        site_packages / module.name: module.read_text(),
        site_packages / "cgfix_witness.pth": "import cgfix_witness\n",
        metadata / "METADATA": "Metadata-Version: 2.1\nName: cgfix-witness\nVersion: 0\n",
        metadata / "entry_points.txt": (
            "[vllm.general_plugins]\ncgfix_witness = cgfix_witness:register\n"
        ),
    }.items():
        replace(file, text.encode())


class Generating:
    """An engine at work, see ``generate.py``."""

    def __init__(
        self,
        environment: Environment,
        folder: Path,
        wanted: dict[str, Any],
        launcher: tuple[str, ...],
        python: tuple[str, ...],
        variables: dict[str, str],
    ):
        self._events = folder / "events"
        self._output = (folder / "output").open("w+")
        self._process = subprocess.Popen(
            [*launcher, environment.python, *python, generate.__file__, json.dumps(wanted)],
            cwd=folder,
            env=environment.variables(
                **{**VARIABLES, "CGFIX_TEST_WITNESS": str(self._events), **variables}
            ),
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
        )

    def result(self) -> Run:
        """Wait for the end.

        Raises:
            AssertionError: it did not end well, or not in time.
        """
        try:
            code = self._process.wait(240)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = None
        self._output.seek(0)
        output = self._output.read()
        self._output.close()
        results = [line for line in output.splitlines() if line.startswith(generate.MARK)]
        assert code == 0, output
        assert len(results) == 1, output
        return Run(
            **json.loads(results[0].removeprefix(generate.MARK)),
            output=output,
            log=logged(output),
            events=recorded(self._events),
        )


@dataclass(frozen=True)
class Engine:
    """What starts engines: an environment with vLLM, and the folder of a model."""

    environment: Environment
    model: Path

    def start(
        self,
        folder: Path,
        *how: str,
        launcher: tuple[str, ...] = (),
        python: tuple[str, ...] = (),
        wanted: dict[str, Any] | None = None,
        **variables: str,
    ) -> Generating:
        """Start an engine that completes some prompts and ends.

        Args:
            folder: an empty one, for what it writes.
            how: words that ``generate.py`` knows.
            launcher: a command that runs the rest of its command line.
            python: options of Python, or ``-m`` and a module that runs a script.
            wanted: what else to tell ``generate.py``.
            variables: of the environment.
        """
        llm = {"model": str(self.model), **OPTIONS}
        names: dict[str, list[str]] = defaultdict(list)
        for of_fix in FUNCTIONS.values():
            for module, qualnames in of_fix.items():
                names[module] += qualnames
        everything = {"llm": llm, "how": how, "functions": names, **(wanted or {})}
        # vLLM keeps there what it finds out about a model in a process of its own.
        variables.setdefault("VLLM_CACHE_ROOT", str(self.model / "cache"))
        return Generating(self.environment, folder, everything, launcher, python, variables)

    def generate(self, folder: Path, *how: str, **more: Any) -> Run:
        """The same to its end."""
        return self.start(folder, *how, **more).result()
