"""Python processes that run on the stock sources of a release."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from .sources import source_dir


def environment(release: str, **variables: str) -> dict[str, str]:
    """The variables of a process in which ``import vllm`` finds the sources of a release.

    No ``VLLM_CGFIX*`` variable is inherited; give those that are wanted.
    """
    return on_path(source_dir(release), **variables)


def on_path(sources: Path, **variables: str) -> dict[str, str]:
    """The same for a folder of sources that a test has made itself."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("VLLM_")}
    # Bytecode of vLLM is kept beside its sources: compiling it anew costs 10 s a process.
    inherited.pop("PYTHONDONTWRITEBYTECODE", None)
    paths = [str(sources), *inherited.get("PYTHONPATH", "").split(os.pathsep)]
    return {
        **inherited,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        **variables,
    }


def run_python(
    code: str, env: Mapping[str, str], *, options: tuple[str, ...] = (), timeout: float = 300
) -> subprocess.CompletedProcess[str]:
    """Run a program text in a fresh process; fails the test where it fails."""
    done = subprocess.run(
        [sys.executable, *options, "-c", code],
        env=dict(env),
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done
