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

RELEASES = ("0.11.2", "0.16.0", "0.33.0")
SERVING_RELEASES = ("0.17.0", "0.33.0")
"""For the functions that run in every forward pass."""
SERVING_FUNCTIONS = ("get_attention_context", "create_forward_context")
ROUNDS, CALLS = 20, 50_000
"""Of each of these functions, with and without the fix in turn: a million calls each."""
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


# The fix is put in and taken out over and over, so that a busy machine is as busy for both.
_SERVING = """\
import importlib, json, statistics, time, timeit
from types import SimpleNamespace
from vllm_cgfix.verify import cpu
cpu.use_cpu_platform()
import vllm_cgfix
from vllm_cgfix.fixes.skip_attention import FIX
modules = {name: importlib.import_module(name) for name in FIX.edits}
context = modules["vllm.forward_context"]
attention = modules["vllm.model_executor.layers.attention.attention"]
layers = {f"model.layers.{n}.self_attn.attn": SimpleNamespace(kv_cache=[None]) for n in range(32)}
metadata, slots = ({name: object() for name in layers} for _ in range(2))
config = SimpleNamespace(
    compilation_config=SimpleNamespace(static_forward_context=layers, fast_moe_cold_start=False)
)
name = [*layers][16]

WHAT = {
    "get_attention_context": "get_attention_context(name)",
    "create_forward_context": "create_forward_context(metadata, config, slot_mapping=slots)",
}

def measure():
    names = {**vars(attention), **vars(context), **globals()}
    made = context.create_forward_context(metadata, config, slot_mapping=slots)
    with context.override_forward_context(made):
        assert attention.get_attention_context(name)[0] is metadata[name]
        return {
            function: timeit.timeit(call, number=CALLS, globals=names, timer=time.process_time)
            / CALLS
            for function, call in WHAT.items()
        }

samples = {"stock": [], "edited": []}
for _ in range(ROUNDS):
    vllm_cgfix.undo()
    assert not hasattr(context.ForwardContext, "skip_attention")
    samples["stock"].append(measure())
    vllm_cgfix.register()
    assert context.ForwardContext.skip_attention is False
    samples["edited"].append(measure())
print(json.dumps({
    f"{what} {function}": [statistics.median(sample[function] for sample in found)]
    for what, found in samples.items() for function in found[0]
}))
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


def figures(repeat: int, rounds: int = ROUNDS) -> list[Row]:
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
    code = _SERVING.replace("ROUNDS", str(rounds)).replace("CALLS", str(CALLS))
    for release in SERVING_RELEASES:
        found = medians(code, environment(release, VLLM_CGFIX="skip-attention"), 1)
        for function in SERVING_FUNCTIONS:
            (stock,), (edited,) = (found[f"{what} {function}"] for what in ("stock", "edited"))
            what = f"serving, {release}: {function}"
            rows.append((f"{what}, stock", "", f"{stock * 1e9:.1f} ns", ""))
            rows.append((f"{what}, with skip-attention", "", f"{edited * 1e9:.1f} ns", ""))
            rows.append((f"{what}, ratio", "", f"{edited / stock:.3f}", "1.00"))
    print(file=sys.stderr)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--repeat", type=int, default=5, help="processes a figure (default: 5)")
    arguments = parser.parse_args()
    rows = figures(arguments.repeat, ROUNDS if arguments.repeat > 1 else 2)
    print(f"medians of {arguments.repeat} processes")
    print(tabulate(rows, headers=("what", "wall", "CPU", "goal")))
    return 0


if __name__ == "__main__":
    sys.exit(main())
