"""What the V2 runner does while it captures, seen from outside of the functions under test.

``CudaGraphManager.capture`` walks over its descriptors through ``tqdm``: in its place stands a
generator that knows which descriptor is being captured. Generic attention gets its metadata
through ``get_attention_context``: a wrapper around it counts calls.
"""

from __future__ import annotations

import functools
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any


class Captures:
    """Counts and times of every capture in this process.

    Attributes:
        calls: ``"MODE with metadata"`` or ``"MODE without"`` to the number of calls of
            ``get_attention_context`` while a descriptor of that mode was captured.
        sizes: mode to the token counts whose capture came to its end, in order.
        seconds: mode to the seconds of each walk over its descriptors.
        totals: seconds of each ``capture_model``.
        bytes: what each ``capture_model`` returned, the memory of the graphs.
    """

    def __init__(self, *, count_calls: bool) -> None:
        from vllm.v1.worker.gpu import cudagraph_utils, model_runner

        self.calls: Counter[str] = Counter()
        self.sizes: dict[str, list[int]] = {}
        self.seconds: dict[str, list[float]] = {}
        self.totals: list[float] = []
        self.bytes: list[int] = []
        self._mode: str | None = None
        self._strict = count_calls
        cudagraph_utils.tqdm = self._walk
        runner = model_runner.GPUModelRunner
        runner.capture_model = self._timed(runner.capture_model)
        if count_calls:
            self._count_calls()

    def _walk(self, descriptors: Iterable[Any], desc: str = "", **_: Any) -> Iterator[Any]:
        import torch

        torch.cuda.synchronize()
        # The last word of a process that a kernel's error ends on the spot.
        print(f"{desc}: begins", flush=True)
        begin, mode = time.perf_counter(), "?"
        for descriptor in descriptors:
            self._mode = mode = descriptor.cg_mode.name
            yield descriptor
            if self._strict:
                # An error of a kernel belongs to the descriptor that launched it.
                torch.cuda.synchronize()
            self.sizes.setdefault(mode, []).append(descriptor.num_tokens)
            self._mode = None
        torch.cuda.synchronize()
        seconds = time.perf_counter() - begin
        self.seconds.setdefault(mode, []).append(round(seconds, 4))
        print(f"{desc}: {seconds:.2f} s", flush=True)

    def _timed(self, capture_model: Any) -> Any:
        import torch

        @functools.wraps(capture_model)
        def timed(runner: Any, *args: Any, **kwargs: Any) -> Any:
            torch.cuda.synchronize()
            begin = time.perf_counter()
            taken = capture_model(runner, *args, **kwargs)
            torch.cuda.synchronize()
            self.totals.append(round(time.perf_counter() - begin, 4))
            self.bytes.append(int(taken))
            return taken

        return timed

    def _count_calls(self) -> None:
        from vllm.model_executor.layers.attention import attention, mla_attention

        assert vars(mla_attention)["get_attention_context"] is attention.get_attention_context
        original = attention.get_attention_context

        @functools.wraps(original)
        def counted(layer_name: Any) -> Any:
            context = original(layer_name)
            if self._mode is not None:
                has = "with metadata" if context[0] is not None else "without"
                self.calls[f"{self._mode} {has}"] += 1
            return context

        # MLA and others bind the function by name.
        for name, module in list(sys.modules.items()):
            names = vars(module) if name.startswith("vllm.") else {}
            if names.get("get_attention_context") is original:
                names["get_attention_context"] = counted

    def summary(self) -> dict[str, Any]:
        """Everything, for a report."""
        return {
            "calls": dict(sorted(self.calls.items())),
            "sizes": self.sizes,
            "seconds": self.seconds,
            "totals": self.totals,
            "bytes": self.bytes,
        }
