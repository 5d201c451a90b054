"""The main job of the plugin, on real stock vLLM 0.11.2, without a GPU: ``tox run -e demo``."""

from __future__ import annotations

import subprocess
import sys

from .releases.process import environment

RELEASE = "0.11.2"


def main() -> int:
    """Fetch the release and run ``vllm-cgfix verify`` on it; returns its exit code."""
    command = [
        sys.executable,
        "-m",
        "vllm_cgfix.cli",
        "verify",
        *(sys.argv[1:] or ["dispatch-order"]),
    ]
    return subprocess.run(command, env=environment(RELEASE)).returncode


if __name__ == "__main__":
    sys.exit(main())
