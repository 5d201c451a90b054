"""Which children there are, by release, in the order in which their results matter."""

from __future__ import annotations

from vllm_cgfix.fixes import CATALOGUE

from .children import Child

DISPATCH = "dispatch-order"
SKIP = "skip-attention"
SLOTS = "dummy-slots"
LENGTHS = "dummy-lengths"
CLAMP = "dummy-seq-clamp"
DRIVERS = "tests.gpu.drivers"
V1, V1_PADDED, V2_OPT_IN, V2 = "0.11.2", "0.16.0", "0.20.2", "0.33.0"
RELEASES = (V1, V1_PADDED, V2_OPT_IN, V2)

BACKENDS = ("FLASH_ATTN", "FLASHINFER", "TRITON_ATTN")
V1_BACKENDS = BACKENDS[:2]
SCHEDULING = ("sync", "async")
CUDAGRAPH_MODES = ("FULL_AND_PIECEWISE", "PIECEWISE")
KINDS = (
    *("qwen3", "mla", "mamba", "llama", "moe"),
    *("sliding", "lora", "eagle", "draft", "gdn"),
)
PROFILED = KINDS[:3]
"""The kinds whose KV cache vLLM sizes itself: dense, MLA and hybrid."""


def pair(name: str, module: str, fix: str, *arguments: str, **more: object) -> list[Child]:
    """A child of stock vLLM and one with a fix, otherwise the same."""
    return [
        Child(f"{name}/{label}", f"{DRIVERS}.{module}", arguments, on, **more)  # type: ignore[arg-type]
        for label, on in (("stock", None), ("plugin", fix))
    ]


def verify(fix: str) -> Child:
    """``vllm-cgfix verify``, which starts stock and plugin itself."""
    return Child(
        f"verify/{fix}",
        "vllm_cgfix.cli",
        ("verify", fix),
        fix,
        timeout=300,
        # The environment of a user: the reproductions choose theirs.
        environ={"VLLM_CGFIX_STRICT": "0"},
        reports=False,
    )


def children(release: str) -> dict[str, Child]:
    """Every child of a release by its name, the most important first."""
    plan: list[Child] = []
    if release == V1:
        for scheduling in SCHEDULING:
            for backend in V1_BACKENDS:
                plan += pair(
                    f"kv/{backend}/{scheduling}",
                    "dispatch_order",
                    DISPATCH,
                    *(["--async-scheduling"] if scheduling == "async" else []),
                    environ={"VLLM_ATTENTION_BACKEND": backend},
                )
        plan += pair(
            "hang",
            "flashinfer_hang",
            DISPATCH,
            environ={"VLLM_ATTENTION_BACKEND": "FLASHINFER"},
        )
        for backend in V1_BACKENDS:
            plan += pair(
                f"dp/{backend}",
                "two_ranks",
                DISPATCH,
                environ={"VLLM_ATTENTION_BACKEND": backend},
                timeout=480,
            )
    if release == V1_PADDED:
        for scheduling in SCHEDULING:
            asynchronous = ["--async-scheduling"] if scheduling == "async" else []
            plan += pair(f"slots/{scheduling}", "dispatch_order", SLOTS, *asynchronous)
    if release == V2_OPT_IN:
        v2 = {"VLLM_USE_V2_MODEL_RUNNER": "1"}
        plan += pair("poison", "block_table", SKIP, environ=v2, timeout=180)
        plan += pair(
            "lengths", "block_table", LENGTHS, "--poisoned", "start", environ=v2, timeout=180
        )
        for backend in BACKENDS:
            for mode in CUDAGRAPH_MODES:
                plan += pair(
                    f"warm/{mode}/{backend}",
                    "skip_attention",
                    SKIP,
                    *("--cudagraph-mode", mode, "--backend", backend),
                    environ=v2,
                )
    if release == V2:
        plan += pair(
            "clamp",
            "block_table",
            CLAMP,
            *("--poisoned", "capture of V1", "--backend", "TRITON_ATTN"),
            *("--cudagraph-mode", "FULL", "--max-num-seqs", "512"),
            environ={"VLLM_USE_V2_MODEL_RUNNER": "0"},
            timeout=180,
        )
        for kind in KINDS:
            profile = ("--profile-memory",) if kind in PROFILED else ()
            plan += pair(f"kind/{kind}", "skip_attention", SKIP, "--kind", kind, *profile)
        for warmup, more in (("warm", ()), ("cold", ("--no-jit-warmup",))):
            for backend in BACKENDS:
                for mode in CUDAGRAPH_MODES:
                    plan += pair(
                        f"{warmup}/{mode}/{backend}",
                        "skip_attention",
                        SKIP,
                        *("--cudagraph-mode", mode, "--backend", backend, *more),
                    )
        for mode in CUDAGRAPH_MODES:
            plan += pair(
                f"monitor/{mode}",
                "skip_attention",
                SKIP,
                *("--cudagraph-mode", mode, "--backend", "FLASH_ATTN", "--jit-monitor", "error"),
            )
    plan += [verify(fix.id) for fix in CATALOGUE]
    return {child.name: child for child in plan}
