"""What ``skip-attention`` must keep beyond its row, on the stock sources of the releases."""

from __future__ import annotations

import ast
import importlib.util
import sys
import types
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest

from vllm_cgfix.code_edit import find_function
from vllm_cgfix.fixes import skip_attention
from vllm_cgfix.verify import reproduce

from .layer_kinds import KINDS
from .process import environment, run_python
from .sources import source_dir

FIX = skip_attention.FIX
LAYER_KINDS = Path(__file__).with_name("layer_kinds.py")
SOME = ("0.17.0", "0.20.2", "0.27.0", "0.33.0")
"""The first and last release of both spans that need the fix."""

# --- who gets metadata from get_attention_context, and why None is safe there -------------------

SPLIT = "a splitting operator: it runs between the graphs"
IGNORES = "does not look at the metadata"
LEFT_ALONE = "branches for PCP or hisparse only, and there the fix leaves the engine alone"
NOT_COMPILED = "in a model that is not compiled: PIECEWISE is breakable there, and never skipped"
CALLERS = {
    "vllm/compilation/passes/fusion/mla_rope_kvcache_cat_fusion.py": {
        "fused_rope_unified_mla_kv_cache_update_impl": LEFT_ALONE,
    },
    "vllm/compilation/passes/fusion/qk_norm_rope_kvcache_fusion.py": {
        "fused_qk_norm_mrope_and_unified_kv_cache_update_impl": IGNORES,
        "fused_qk_norm_rope_and_unified_kv_cache_update_impl": IGNORES,
    },
    "vllm/compilation/passes/fusion/rope_kvcache_fusion.py": {
        "fused_rope_and_unified_kv_cache_update_impl": IGNORES,
    },
    "vllm/model_executor/layers/attention/attention.py": {
        "unified_attention": SPLIT,
        "unified_attention_with_output": SPLIT,
        "unified_kv_cache_update": IGNORES,
    },
    "vllm/model_executor/layers/attention/kv_transfer_utils.py": {
        # Without metadata, or without a connector's, it calls the operator: the same in capture.
        "maybe_transfer_kv_layer.wrapper": SPLIT,
    },
    "vllm/model_executor/layers/attention/mla_attention.py": {
        "unified_mla_attention": SPLIT,
        "unified_mla_attention_with_output": SPLIT,
        "unified_mla_kv_cache_update": LEFT_ALONE,
    },
    "vllm/models/deepseek_v32/attention.py": {
        "DeepseekV32Attention._sparse_indexer_and_attn": NOT_COMPILED,
        "DeepseekV32Attention.forward": NOT_COMPILED,
    },
    "vllm/models/kimi_k3/amd/mla.py": {
        "KimiK3MultiHeadLatentAttentionWrapper.forward": NOT_COMPILED,
    },
    "vllm/models/muse_spark/common/ops/fused_qk_norm_rope_kv.py": {
        "fused_qk_norm_rope_kv_insert": NOT_COMPILED,
    },
    "vllm/models/step5/nvidia/model.py": {
        "Step5Attention.forward": NOT_COMPILED,
        "step5_dsa_attention_with_output": NOT_COMPILED,
        "step5_swa_attention_with_output": NOT_COMPILED,
    },
}


@cache
def callers(release: str) -> list[tuple[str, str, ast.Assign]]:
    """Path, qualified name and statement of each call of ``get_attention_context``."""
    root = source_dir(release)
    found: list[tuple[str, str, ast.Assign]] = []
    calls = 0

    def visit(node: ast.AST, path: str, names: tuple[str, ...]) -> None:
        nonlocal calls
        for child in ast.iter_child_nodes(node):
            scope = names
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                scope = (*names, child.name)
            if isinstance(child, ast.Call) and "get_attention_context" in ast.unparse(child.func):
                calls += 1
            if (
                isinstance(child, ast.Assign)
                and isinstance(child.value, ast.Call)
                and "get_attention_context" in ast.unparse(child.value.func)
            ):
                found.append((path, ".".join(names), child))
            visit(child, path, scope)

    for file in sorted((root / "vllm").rglob("*.py")):
        text = file.read_text("utf-8")
        if "get_attention_context" in text:
            visit(ast.parse(text), str(file.relative_to(root)), ())
    assert calls == len(found), "a call whose result is not unpacked is not understood here"
    return found


@pytest.mark.parametrize("release", FIX.releases)
def test_every_caller_is_known_and_safe(release):
    splitting = (source_dir(release) / "vllm/config/compilation.py").read_text("utf-8")
    seen = set()
    for path, name, statement in callers(release):
        reason = CALLERS.get(path, {}).get(name)
        assert reason is not None, f"{release}: {path} {name} is not a caller that is known"
        seen.add(reason)
        metadata = ast.unparse(statement.targets[0].elts[0])
        function = find_function(ast.parse((source_dir(release) / path).read_text("utf-8")), name)
        if reason is IGNORES:
            assert metadata == "_"
        elif reason is SPLIT and "wrapper" not in name:
            assert f'"vllm::{name}"' in splitting
        elif reason is LEFT_ALONE:
            # What depends on the metadata here has to do with PCP or hisparse.
            text = ast.unparse(function)
            uses = text.count(metadata) - 1 if metadata != "_" else 0
            assert uses == 0 or "pcp" in text.lower() or "prepare_kv_cache_update" in text
    assert seen >= {SPLIT, IGNORES}


# --- what the skipped passes would do on the side ----------------------------------------------


def config(*, full=True, **parts):
    """A configuration in which nothing stands in the way of skipping."""
    made = {
        "compilation_config": SimpleNamespace(
            splitting_ops=None,
            static_forward_context={},
            cudagraph_mode=SimpleNamespace(has_full_cudagraphs=lambda: full),
        ),
        "parallel_config": SimpleNamespace(decode_context_parallel_size=1),
        "kernel_config": SimpleNamespace(enable_jit_warmup=True),
        "attention_config": SimpleNamespace(hisparse_config=None),
    }
    return SimpleNamespace(**{**made, **parts})


@pytest.mark.parametrize(
    ("parts", "splitting_ops", "reason"),
    [
        ({}, None, None),
        ({"parallel_config": SimpleNamespace(prefill_context_parallel_size=2)}, [], "prefill"),
        (
            {"parallel_config": SimpleNamespace(prefill_context_parallel_size=2)},
            ["vllm::unified_mla_kv_cache_update"],
            None,
        ),
        ({"attention_config": SimpleNamespace(hisparse_config=object())}, None, "hisparse"),
        (
            {"attention_config": SimpleNamespace(hisparse_config=object())},
            ["vllm::unified_mla_kv_cache_update"],
            None,
        ),
    ],
)
def test_an_operator_that_branches_inside_a_graph(parts, splitting_ops, reason):
    some = config(**parts)
    some.compilation_config.splitting_ops = splitting_ops
    found = skip_attention._needs_metadata_in_graph(some)
    assert (found is None) if reason is None else (reason in found)


def test_a_start_without_jit_warm_up():
    assert skip_attention._warms_up_in_capture(config()) is None
    off = config(kernel_config=SimpleNamespace(enable_jit_warmup=False))
    assert "JIT warm-up is off" in skip_attention._warms_up_in_capture(off)
    assert skip_attention._warms_up_in_capture(config(kernel_config=SimpleNamespace())) is None


@pytest.mark.parametrize("full", [True, False])
@pytest.mark.parametrize("name", ["FlashAttentionImpl", "FlashInferImpl", "TritonAttentionImpl"])
def test_a_capture_without_full_graphs(monkeypatch, name, full):
    some = config(full=full)
    some.compilation_config.static_forward_context = layers(monkeypatch, (name, False))
    found = skip_attention._warms_up_in_capture(some)
    if full or name != "TritonAttentionImpl":
        assert found is None
    else:
        assert name in found


@pytest.mark.parametrize("release", FIX.releases)
def test_which_releases_warm_up_before_the_capture(release):
    tree = ast.parse((source_dir(release) / "vllm/v1/worker/gpu_worker.py").read_bytes())
    (worker,) = [node for node in tree.body if getattr(node, "name", "") == "Worker"]
    lines = {
        name: min(
            node.lineno
            for method in worker.body
            if "compile_or_warm_up_model" in getattr(method, "name", "")
            for node in ast.walk(method)
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(name)
        )
        for name in ("warmup_kernels", "capture_model")
    }
    before = lines["warmup_kernels"] < lines["capture_model"]
    assert before is (release in skip_attention.WARMED_BEFORE_CAPTURE)


def layers(monkeypatch, *kinds, prefill=None):
    """Attention layers whose implementations come from modules that use the workspace or not."""
    made = {}
    for number, (name, uses_workspace) in enumerate(kinds):
        module = types.ModuleType(f"cgfix_backend_{number}")
        if uses_workspace:
            module.current_workspace_manager = None
        monkeypatch.setitem(sys.modules, module.__name__, module)
        implementation = type(name, (), {"__module__": module.__name__})()
        if prefill is not None:
            implementation.prefill = prefill
        made[name] = SimpleNamespace(impl=implementation)
    made["moe"] = SimpleNamespace()
    return made


@pytest.mark.parametrize(
    ("kind", "decode_context_parallel", "left_alone"),
    [
        (("FlashAttentionImpl", True), 1, False),
        (("FlashAttentionImpl", True), 2, True),
        (("TurboQuantImpl", True), 1, True),
        (("TritonAttentionImpl", False), 2, False),
    ],
)
def test_attention_that_reserves_workspace(monkeypatch, kind, decode_context_parallel, left_alone):
    some = config()
    some.parallel_config.decode_context_parallel_size = decode_context_parallel
    some.compilation_config.static_forward_context = layers(monkeypatch, kind)
    for release, warmed in [("0.29.0", False), ("0.30.0", True), (None, False)]:
        monkeypatch.setattr(skip_attention, "release_of", {skip_attention.ID: release}.get)
        found = skip_attention._reserves_workspace_in_capture(some)
        assert bool(found) is (left_alone and not warmed), release


def test_mla_whose_prefill_kernels_reserve_workspace(monkeypatch):
    prefill = layers(monkeypatch, ("Prefill", True))["Prefill"].impl
    monkeypatch.setitem(sys.modules, "cgfix_prefill", sys.modules["cgfix_backend_0"])
    type(prefill).__module__ = "cgfix_prefill"
    some = config()
    some.compilation_config.static_forward_context = layers(
        monkeypatch, ("MLAImpl", False), prefill=prefill
    )
    assert "Prefill" in skip_attention._reserves_workspace_in_capture(some)


# --- the edited code ---------------------------------------------------------------------------

_IN_A_RELEASE = """
import copy, dataclasses, inspect, pickle, sys
import vllm_cgfix
from vllm_cgfix.verify import cpu, importers

cpu.use_cpu_platform()
names = ("get_attention_context", "create_forward_context", "set_forward_context")
register_first = {register_first}
if register_first:
    vllm_cgfix.register()
else:
    import vllm.forward_context
bound = {{name: importers.import_all(name) for name in names}}
context = sys.modules["vllm.forward_context"].ForwardContext
stock_fields = None if register_first else [f.name for f in dataclasses.fields(context)]
stock_init = context.__init__
required = [f.name for f in dataclasses.fields(context)
            if f.default is f.default_factory is dataclasses.MISSING]
old = context(*[{{}} for _ in required])
vllm_cgfix.register()
import vllm.v1.worker.gpu_worker, vllm.v1.worker.gpu.cudagraph_utils
status = {{s.fix.id: s for s in vllm_cgfix.status()}}["skip-attention"]
assert status.state.value == "applied", status

# by-name bindings, all of them, are the edited function
for name, (found, failed) in bound.items():
    functions = {{id(function) for function in found.values()}}
    assert len(functions) == 1, (name, found)
    function = next(iter(found.values()))
    code = getattr(function, "__wrapped__", function).__code__
    assert "skip_attention" in code.co_names + code.co_varnames, name
    print(name, "is bound by", len(found), "modules; not importable here:", len(failed))
    assert len(found) >= {{"get_attention_context": 3, "create_forward_context": 2,
                          "set_forward_context": 5}}[name], found

# the dataclass
fields = [f.name for f in dataclasses.fields(context)]
assert fields[-1] == "skip_attention" and fields.count("skip_attention") == 1
if stock_fields is not None:
    assert fields[:-1] == stock_fields
    assert context.__init__ is not stock_init
assert context.__match_args__ == tuple(fields)
assert old.skip_attention is False  # made before the edit, or not
made = context(*[{{}} for _ in required])
assert made.skip_attention is False and made == context(*[{{}} for _ in required])
other = dataclasses.replace(made, skip_attention=True)
assert other != made and other.skip_attention and "skip_attention=True" in repr(other)
assert pickle.loads(pickle.dumps(other)) == other == copy.deepcopy(other)
assert made.additional_kwargs == {{}} and made.additional_kwargs is not other.__class__(
    *[{{}} for _ in required]).additional_kwargs

# the signatures: last, and the stock call by position still fits
for name in names[1:]:
    function = getattr(sys.modules["vllm.forward_context"], name)
    parameters = list(inspect.signature(function).parameters.values())
    assert parameters[-1].name == "skip_attention" and parameters[-1].default is False

vllm_cgfix.undo()
assert [f.name for f in dataclasses.fields(context)] == fields[:-1]
assert not hasattr(made, "skip_attention") or "skip_attention" in vars(made)
assert "skip_attention" not in context.__match_args__
assert {{s.fix.id: s.state.value for s in vllm_cgfix.status()}}["skip-attention"] == "off"
"""


@pytest.mark.parametrize("register_first", [True, False], ids=["before", "after"])
@pytest.mark.parametrize("release", SOME)
def test_every_binding_and_the_dataclass(release, register_first):
    """Whether the modules that bind the functions were imported before or after the plugin."""
    env = environment(release, VLLM_CGFIX="skip-attention", VLLM_PLUGINS="")
    print(run_python(_IN_A_RELEASE.format(register_first=register_first), env).stdout)


_MLA = """
import sys, types
import torch
import vllm_cgfix
from vllm_cgfix.verify import cpu

cpu.use_cpu_platform()
vllm_cgfix.register()
from vllm.model_executor.layers.attention import mla_attention
import vllm.forward_context as contexts
import dataclasses
import vllm.v1.worker.gpu_worker, vllm.v1.worker.gpu.cudagraph_utils

layer = types.SimpleNamespace(
    chunked_prefill_workspace_size=64, num_heads=2, qk_nope_head_dim=8, v_head_dim=8,
    impl=types.SimpleNamespace(reserve_workspace=lambda: None),
)
required = [f.name for f in dataclasses.fields(contexts.ForwardContext)
            if f.default is f.default_factory is dataclasses.MISSING]
context = contexts.ForwardContext(**dict.fromkeys(required))
made = []
real = torch.empty
def empty(*shape, **options):
    made.append(shape)
    return real(*shape, **options)
mla_attention.torch = types.SimpleNamespace(**{**vars(torch), "empty": empty})

def run(skip):
    made.clear()
    output = torch.ones(3, 16)
    part = torch.zeros(3, 8)
    with contexts.override_forward_context(context):
        if skip:
            context.skip_attention = True
        mla_attention.MLAAttention.forward_impl(
            layer, part, part, part, torch.zeros(0), None, output=output)
    if skip:
        context.skip_attention = False
    assert not output.any()
    return [shape for shape in made if shape == ((64, 2, 16),)]

assert len(run(False)) == 1, "the profiling path allocates, as in stock vLLM"
fixed = {s.fix.id: s.state.value for s in vllm_cgfix.status()}["skip-attention"] == "applied"
print("allocations when skipped:", len(run(True)) if fixed else "not applied")
"""


@pytest.mark.parametrize("release", SOME)
def test_mla_returns_zeros_without_the_allocation_of_its_profile(release):
    env = environment(release, VLLM_CGFIX="skip-attention", VLLM_PLUGINS="")
    assert "allocations when skipped: 0" in run_python(_MLA, env).stdout


@pytest.mark.parametrize("release", SOME)
def test_every_kind_of_attention_layer(release):
    """Sliding window, KV sharing, encoder-only and cross attention go through the same place."""
    env = environment(release, VLLM_CGFIX="skip-attention")
    printed = run_python(LAYER_KINDS.read_text("utf-8"), env).stdout
    assert [kind for kind in KINDS if f"{kind}: skipped" in printed] == list(KINDS)


_WORKER = """
import vllm_cgfix
from vllm_cgfix.verify import cpu

cpu.use_cpu_platform()
config = cpu.make_config()
from vllm.v1.worker.gpu_worker import Worker

with cpu.single_process_group(config):
    Worker(config, local_rank=0, rank=0, distributed_init_method="file:///nowhere")
print({s.fix.id: s for s in vllm_cgfix.status()}["skip-attention"])
"""


def test_the_state_says_which_runner_the_process_uses():
    env = environment("0.33.0", VLLM_CGFIX="all")
    assert "this process uses the V1 runner" in run_python(_WORKER, env).stdout


def test_breakable_graphs_are_captured_as_in_stock_vllm():
    """Every pass, the raw metadata and what attention is given, is the same."""
    env = environment("0.33.0")
    stock, fixed = (
        reproduce(FIX, with_plugin=on, environ=env, arguments=("--breakable",))
        for on in (False, True)
    )
    assert fixed.status[FIX.id] == "applied"
    assert stock.observations["passes"] == fixed.observations["passes"] != []
    assert stock.faults == fixed.faults == []
    assert fixed.unmet == []


def test_the_package_finds_no_reason_to_import_vllm():
    """The fixes are imported by the command line, where there may be no vLLM or torch."""
    spec = importlib.util.find_spec("vllm_cgfix.fixes.skip_attention")
    tree = ast.parse(Path(spec.origin).read_text("utf-8"))
    imported = {
        name
        for node in tree.body
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    assert not {name for name in imported if name.split(".")[0] in {"vllm", "torch"}}
