"""What the plugin costs: nothing to speak of where it is off, little where it is on.

    python -m tests.bench.plugin_cost [--repeat N]

Each figure is the median over fresh processes, on the stock sources of releases. The model runner
is imported for real, on the CPU.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Mapping

from tabulate import tabulate

from tests.releases.process import environment, run_python

RELEASES = ("0.11.2", "0.33.0")
MORE_OBJECTS = 3_000_000
"""For the large heap: the imports alone leave some hundred thousand."""

# Both clocks: on a busy machine the wall's says more about the others.
_CLOCK = """\
import time
def now(): return time.perf_counter(), time.process_time()
def since(start): return [after - before for before, after in zip(start, now())]
"""

_OFF = """\
import sys
import vllm_cgfix
before = set(sys.modules)
start = now()
vllm_cgfix.register()
seconds = since(start)
added = set(sys.modules) - before
import json
foreign = [name for name in added if name.split(".")[0] in ("vllm", "torch")]
print(json.dumps({"register": seconds, "modules": [len(added)], "foreign": [len(foreign)]}))
"""

# wrapt apart from the rest: a process that uses other plugins may have imported it before.
_ON = """\
import vllm, vllm.envs, vllm.plugins
times = {}
start = begin = now()
import wrapt
times["wrapt"], begin = since(begin), now()
import vllm_cgfix.plugin
times["own"], begin = since(begin), now()
vllm_cgfix.register()
times["register"], times["decision"] = since(begin), since(start)
import json
print(json.dumps(times))
"""

_EDIT = """\
import gc, importlib, json
from vllm_cgfix.verify import cpu
cpu.use_cpu_platform()
import vllm_cgfix
from vllm_cgfix import code_edit, plugin

times = {}

class Timed(code_edit.SourceEditor):
    def __init__(self, module, *rest):
        self.start = now()
        super().__init__(module, *rest)

    def set_active(self, edits):
        super().set_active(edits)
        times[self.module.__name__] = since(self.start)

plugin.SourceEditor = Timed
vllm_cgfix.register()
needed = [status.fix for status in vllm_cgfix.status() if status.state == "pending"]
import torch, transformers
more = [[] for _ in range(MORE_OBJECTS)]
gc.collect()  # as old as a served model's; else the edit would pay for the first look at them
for fix in needed:
    for name in fix.edits:
        importlib.import_module(name)
applied = [status.fix for status in vllm_cgfix.status() if status.state == "applied"]
assert needed and applied == needed, vllm_cgfix.status()
print(json.dumps({**times, "objects": [len(gc.get_objects())]}))
"""


def medians(code: str, env: Mapping[str, str], repeat: int) -> dict[str, list[float]]:
    """Run a program in fresh processes; medians of what it prints: a number, or two clocks'."""
    samples: list[dict[str, list[float]]] = []
    for _ in range(repeat):
        samples.append(json.loads(run_python(_CLOCK + code, env).stdout.splitlines()[-1]))
        print(".", end="", file=sys.stderr, flush=True)
    return {
        name: [*map(statistics.median, zip(*(sample[name] for sample in samples), strict=True))]
        for name in samples[0]
    }


Row = tuple[str, str, str, str]


def figures(repeat: int) -> list[Row]:
    """What was measured, the wall's and the CPU's time (or a number), and the goal if any."""
    rows: list[Row] = []

    def times(what: str, seconds: list[float], goal: str = "") -> None:
        wall, cpu = (f"{value * 1e3:.2f} ms" for value in seconds)
        rows.append((what, wall, cpu, goal))

    def number(what: str, value: list[float], goal: str) -> None:
        rows.append((what, f"{value[0]:.0f}", "", goal))

    for setting, variables in (("unset", {}), ("=0", {"VLLM_CGFIX": "0"})):
        found = medians(_OFF, environment(RELEASES[0], **variables), repeat)
        what = f"off (VLLM_CGFIX {setting})"
        times(f"{what}: register()", found["register"], "< 1 ms")
        number(f"{what}: modules added", found["modules"], "<= 3")
        number(f"{what}: of them vLLM's or torch's", found["foreign"], "0")
    for release in RELEASES:
        found = medians(_ON, environment(release, VLLM_CGFIX="all"), repeat)
        times(f"on, {release}: decision", found["decision"], "< 20 ms")
        times(f"on, {release}: of it import of wrapt", found["wrapt"])
        times(f"on, {release}: of it imports of vllm_cgfix", found["own"])
        times(f"on, {release}: of it register()", found["register"])
    for release in RELEASES:
        for more in (0, MORE_OBJECTS):
            code = _EDIT.replace("MORE_OBJECTS", str(more))
            found = medians(code, environment(release, VLLM_CGFIX="all"), repeat)
            heap = f"{found.pop('objects')[0] / 1e6:.1f} M objects"
            for module, seconds in found.items():
                what = f"edit, {release}, {heap}: {module.removeprefix('vllm.')}"
                times(what, seconds, "< 150 ms")
    print(file=sys.stderr)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--repeat", type=int, default=5, help="processes a figure (default: 5)")
    arguments = parser.parse_args()
    rows = figures(arguments.repeat)
    print(f"medians of {arguments.repeat} processes")
    print(tabulate(rows, headers=("what", "wall", "CPU", "goal")))
    return 0


if __name__ == "__main__":
    sys.exit(main())
