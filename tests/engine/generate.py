"""An engine's life in one process tree: started, asked to complete some prompts, described.

Runs in an environment that has vLLM, which is not that of the tests::

    python generate.py '{"llm": {"model": "FOLDER", "enforce_eager": true}}'

The object may also have ``how`` (a list of words, see :func:`main`), ``functions`` (what the
needed fixes edit: module to qualified names), ``prompts`` and ``max_tokens`` (numbers), ``done`` (a
file to write at the end) and ``wait_for`` (a file to wait for before it).
"""

from __future__ import annotations

import importlib.machinery
import inspect
import json
import os
import sys
import time
from operator import attrgetter
from pathlib import Path
from types import CodeType
from typing import Any

# The first and the third end alike: their answers differ by what attention reads.
PROMPTS = ([5, 6, 7, 8], [9, 10, 11], [17, 3, 7, 8], list(range(20, 60)))
MARK = "RESULT "


def edited(functions: dict[str, list[str]]) -> list[str]:
    """Of functions of imported modules, those that do not run what is in the module's file."""
    found = set()
    for name in functions.keys() & sys.modules.keys():
        package = sys.modules[name.rpartition(".")[0]]
        spec = importlib.machinery.PathFinder.find_spec(name, package.__path__)
        stock = all_code(spec.loader.get_code(name))  # type: ignore[union-attr,arg-type]
        for qualname in functions[name]:
            code = inspect.unwrap(attrgetter(qualname)(sys.modules[name])).__code__
            if code not in stock:
                found.add(f"{name}:{qualname}")
    return sorted(found)


def all_code(code: CodeType) -> list[CodeType]:
    """A code object and all those within."""
    inner = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return [code, *(found for each in inner for found in all_code(each))]


def describe(worker: Any, functions: dict[str, list[str]]) -> dict[str, Any]:
    """This process: what the plugin says of it and has loaded, and which model runner it has."""
    plugin = sys.modules.get("vllm_cgfix")
    statuses = plugin.status() if plugin else []
    return {
        "pid": os.getpid(),
        "states": {status.fix.id: status.state.value for status in statuses},
        "notes": {status.fix.id: status.notes for status in statuses},
        "reasons": {status.fix.id: status.reason for status in statuses},
        "edited": edited(functions),
        "plugin": sorted(name for name in sys.modules if name.startswith("vllm_cgfix")),
        "runner": worker and type(worker.model_runner).__module__,
        "dummy_batches": getattr(worker, "dummy_batches", 0),
    }


def count_dummy_batches(worker: Any) -> None:
    """Have a worker count the batches that it runs only to keep its busy peers company."""
    worker.dummy_batches = 0
    stock = worker.execute_dummy_batch

    def counted() -> None:
        worker.dummy_batches += 1
        stock()

    worker.execute_dummy_batch = counted


def fork_workers() -> None:
    """Let the variable decide, as where vLLM runs on a GPU: its CPU platform sets it to spawn."""
    from vllm.platforms import current_platform

    platform: Any = type(current_platform)
    stock = platform.check_and_update_config

    def check(config: Any) -> None:
        stock(config)
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"

    platform.check_and_update_config = staticmethod(check)


def interpret_triton() -> None:
    """Let PyPI's Triton, which has no CPU backend, pass for one that has: it only interprets."""
    from types import SimpleNamespace

    from triton.backends import backends

    backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True))


def main() -> None:
    """Do what the command line says, and write one line with the result."""
    wanted = json.loads(sys.argv[1])
    how, functions = wanted.get("how", ()), wanted.get("functions", {})
    if "interpret triton" in how:
        interpret_triton()
    if "import first" in how:
        for name in functions:
            # Unlike importlib.import_module(), which audit hooks do not hear of.
            __import__(name)
    from vllm import LLM, SamplingParams

    if "fork" in how:
        fork_workers()
    llm = LLM(**wanted["llm"])
    llm.collective_rpc(count_dummy_batches)
    answers = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in PROMPTS[: wanted.get("prompts")]],
        SamplingParams(temperature=0, max_tokens=wanted.get("max_tokens", 16), ignore_eos=True),
    )
    while "wait_for" in wanted and not Path(wanted["wait_for"]).exists():
        time.sleep(0.1)
    result = {
        "tokens": [list(answer.outputs[0].token_ids) for answer in answers],
        "main": describe(None, functions),
        "workers": llm.collective_rpc(describe, args=(functions,)),
    }
    # In one write, and on a line of its own: the other processes log to the same stream.
    os.write(1, f"\n{MARK}{json.dumps(result)}\n".encode())
    if "done" in wanted:
        Path(wanted["done"]).touch()


if __name__ == "__main__":
    main()
