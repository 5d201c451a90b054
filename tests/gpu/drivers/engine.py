"""What every driver needs: a report, an engine in this process, and looks into it.

The paths into the engine are those of ``VLLM_ENABLE_V1_MULTIPROCESSING=0`` and hold for every
release that the tests know.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import random
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from . import models

SMALL_SIZES = [1, 2, 4, 8, 16, 32, 64]


class Report:
    """A JSON file that is complete after every entry, for whoever reads it after a crash."""

    def __init__(self, path: Path):
        self.path = path
        self.data: dict[str, Any] = {"seconds": {}}
        self._lock = threading.Lock()
        self._begin = time.monotonic()

    def put(self, key: str, value: Any) -> None:
        """Set an entry."""
        with self._lock:
            self.data[key] = value
            self._write()

    def _write(self) -> None:
        temporary = self.path.with_suffix(".part")
        temporary.write_text(json.dumps(self.data, default=str))
        temporary.replace(self.path)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Say what is going on, and how long it took."""
        self.put("phase", name)
        begin = time.monotonic()
        yield
        self.data["seconds"][name] = round(time.monotonic() - begin, 2)
        print(f"[{time.monotonic() - self._begin:7.1f} s] {name}", flush=True)


def run_driver(
    describe: str,
    add_arguments: Callable[[argparse.ArgumentParser], None],
    drive: Callable[[argparse.Namespace, Report], None],
) -> None:
    """Parse the command line, drive, and report even what goes wrong.

    Exit code 1: ``drive`` raised; ``error`` in the report says what.
    """
    parser = argparse.ArgumentParser(description=describe)
    parser.add_argument("--report", type=Path, required=True, help="the JSON file to write")
    parser.add_argument("--shared-gpu", action="store_true", help="others use the GPU as well")
    add_arguments(parser)
    arguments = parser.parse_args()
    report = Report(arguments.report)
    report.put("arguments", {k: str(v) for k, v in vars(arguments).items()})
    try:
        drive(arguments, report)
        report.put("phase", "done")
        code = 0
    except Exception as error:
        traceback.print_exc()
        report.put("error", f"{type(error).__name__}: {error}"[:2000])
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    # Not through the interpreter's end: a device that has met an error can hang it.
    os._exit(code)


def prepare(report: Report, *, shared_gpu: bool) -> None:
    """Import vLLM and have it load its plugins, so that modules can be observed before use."""
    with report.phase("import"):
        from vllm.plugins import load_general_plugins

        load_general_plugins()
        import vllm
    report.put("vllm", vllm.__version__)
    if shared_gpu:
        count_only_own_memory()


def count_only_own_memory() -> None:
    """Make the free memory of the GPU what this process leaves of it.

    vLLM sizes the KV cache and measures its graphs by the free memory of the whole GPU. With
    other engines beside, that would be their coming and going; what torch has reserved here is the
    same in every run. The driver's own memory for graphs is not in it.
    """
    import torch

    whole = torch.cuda.mem_get_info

    def mem_get_info(device: Any = None) -> tuple[int, int]:
        total = whole(device)[1]
        return total - torch.cuda.memory_reserved(device), total

    torch.cuda.mem_get_info = mem_get_info
    if hasattr(torch.accelerator, "get_memory_info"):
        torch.accelerator.get_memory_info = mem_get_info


def make_llm(model: str, **settings: Any) -> Any:
    """Start an engine on a model with dummy weights.

    Args:
        model: a key of :data:`.models.MODELS`.
        settings: arguments of ``vllm.LLM``; ``config`` changes the model's configuration, and
            ``folder`` is where it lies (its name is in the key of vLLM's compile cache).
    """
    from vllm import LLM

    folder = settings.pop("folder", None) or tempfile.mkdtemp(prefix="model-", dir=os.getcwd())
    path = models.write_model(model, Path(folder), settings.pop("config", None))
    defaults = {
        "disable_log_stats": True,
        "dtype": "bfloat16",
        "gpu_memory_utilization": 0.08,
        "load_format": "dummy",
        "max_model_len": 2048,
        "max_num_seqs": 64,
        "seed": 0,
        "skip_tokenizer_init": True,
    }
    return LLM(model=path, **(defaults | settings))


def core(llm: Any) -> Any:
    """The ``EngineCore``."""
    return llm.llm_engine.engine_core.engine_core


def worker(llm: Any) -> Any:
    """The ``Worker``."""
    return core(llm).model_executor.driver_worker.worker


def runner(llm: Any) -> Any:
    """The ``GPUModelRunner``."""
    return worker(llm).model_runner


def block_pool(llm: Any) -> Any:
    """The ``BlockPool`` of the scheduler."""
    return core(llm).scheduler.kv_cache_manager.block_pool


def randomize_weights(llm: Any, seed: int = 0) -> None:
    """Give an engine's model the weights of :func:`randomize`."""
    randomize(runner(llm).model, seed)


def randomize(model: Any, seed: int = 0) -> None:
    """Give a model weights with which its answer depends on all of its KV cache.

    Dummy weights are within 0.001: each layer's contribution vanishes against the embedding, and
    tokens would be the same whatever attention reads. Matrices become normal with the variance
    that keeps activations at 1, norms become 1. In place: captured graphs see it.
    """
    import torch

    for index, (name, parameter) in enumerate(model.named_parameters()):
        if parameter.dtype not in (torch.bfloat16, torch.float16, torch.float32):
            continue
        data = parameter.data
        if data.ndim == 1:
            data.fill_(0.0 if name.endswith("bias") else 1.0)
            continue
        generator = torch.Generator(device=data.device).manual_seed(1000 * seed + index)
        scale = 1.0 if "embed_tokens" in name else data.shape[-1] ** -0.5
        values = torch.randn(data.shape, generator=generator, device=data.device)
        data.copy_((values * scale).to(data.dtype))


def prompt(seed: int, length: int) -> list[int]:
    """A random prompt; another seed gives another first token, so that no prefix is shared."""
    draw = random.Random(seed)
    first = 3 + seed % (models.VOCABULARY - 3)
    return [first] + [draw.randrange(3, models.VOCABULARY) for _ in range(length - 1)]


def greedy(max_tokens: int) -> Any:
    """Sampling parameters that give exactly ``max_tokens`` tokens, always the same."""
    from vllm import SamplingParams

    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)


def generate(
    llm: Any, prompts: Sequence[list[int]], max_tokens: int, **more: Any
) -> list[list[int]]:
    """The tokens of each prompt."""
    outputs = llm.generate(
        [{"prompt_token_ids": p} for p in prompts], greedy(max_tokens), use_tqdm=False, **more
    )
    return [list(output.outputs[0].token_ids) for output in outputs]


def plugin_state() -> list[dict[str, Any]]:
    """What the plugin says of its fixes in this process; empty without it."""
    plugin = sys.modules.get("vllm_cgfix")
    if plugin is None:
        return []
    return [
        {"id": s.fix.id, "state": s.state.value, "reason": s.reason, "notes": list(s.notes)}
        for s in plugin.status()
    ]


class Kernels:
    """The Triton kernels that this process compiles, or loads for the first time, by name.

    Triton calls its hook for both, so that what another process left in the cache on disk makes
    no difference. FlashInfer's modules are recorded likewise, where its loader is known.
    """

    def __init__(self) -> None:
        self.names: list[str] = []
        self.watched: list[str] = []
        with contextlib.suppress(ImportError, AttributeError):
            from triton import knobs

            before = knobs.runtime.jit_post_compile_hook

            def hook(**event: Any) -> Any:
                self.names.append(getattr(event.get("fn"), "name", "?"))
                return before(**event) if before is not None else None

            knobs.runtime.jit_post_compile_hook = hook
            self.watched.append("triton")
        with contextlib.suppress(ImportError, AttributeError):
            from flashinfer.jit.core import JitSpec

            load = JitSpec.build_and_load

            @functools.wraps(load)
            def build_and_load(spec: Any, *args: Any, **kwargs: Any) -> Any:
                self.names.append(f"flashinfer:{spec.name}")
                return load(spec, *args, **kwargs)

            JitSpec.build_and_load = build_and_load
            self.watched.append("flashinfer")

    def take(self) -> list[str]:
        """The names since the last call, sorted."""
        taken, self.names[:] = sorted(set(self.names)), []
        return taken


class Watchdog:
    """Ends the process where a phase does not come to its end, after reporting that."""

    def __init__(self, report: Report, seconds: float):
        self.report = report
        self.seconds = seconds

    @contextlib.contextmanager
    def over(self, what: str) -> Iterator[None]:
        """Watch over a block."""
        timer = threading.Timer(self.seconds, self._bark, [what])
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _bark(self, what: str) -> None:
        import faulthandler

        faulthandler.dump_traceback()
        self.report.put("hang", f"{what}: no end within {self.seconds:.0f} s")
        os._exit(3)
