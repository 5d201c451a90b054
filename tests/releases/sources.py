"""The Python sources of stock vLLM releases, taken out of their wheels and kept in a cache.

    python -m tests.releases.sources 0.11.2 0.33.0     # fetch what is missing, print the folders

The cache is a folder outside of the tree, ``$CGFIX_TEST_CACHE`` or the user's cache folder; it
can be thrown away at any time.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

RELEASES = (
    *("0.10.2", "0.11.0", "0.11.1", "0.11.2", "0.12.0", "0.13.0", "0.14.0", "0.14.1", "0.15.0"),
    *("0.15.1", "0.16.0", "0.17.0", "0.17.1", "0.18.0", "0.18.1", "0.19.0", "0.19.1", "0.20.0"),
    *("0.20.1", "0.20.2", "0.21.0", "0.22.0", "0.22.1", "0.23.0", "0.24.0", "0.25.0", "0.25.1"),
    *("0.26.0", "0.27.0", "0.27.1", "0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.32.0", "0.33.0"),
)
"""Every supported release, oldest first."""

_KEPT = (".py", "METADATA", "RECORD", "WHEEL", "entry_points.txt")


def cache() -> Path:
    """The folder in which downloads are kept between runs."""
    chosen = os.environ.get("CGFIX_TEST_CACHE")
    if chosen:
        return Path(chosen)
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "vllm-cgfix"


def fetched_once(folder: Path, what: str, fetch: Callable[[Path, Path], None]) -> Path:
    """A folder of the cache, fetched if it is missing.

    Args:
        folder: the folder.
        what: what it holds, for the line that says that it is being fetched.
        fetch: called with a temporary folder and the path at which to make the content. Made aside
            and renamed: a run that is interrupted leaves no half of it.
    """
    if not folder.exists():
        print(f"fetching {what} ...", file=sys.stderr, flush=True)
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
            part = Path(temporary) / "content"
            fetch(Path(temporary), part)
            try:
                part.rename(folder)
            except OSError:
                if not folder.exists():  # another run may have been first
                    raise
    return folder


def source_dir(release: str) -> Path:
    """A folder for ``PYTHONPATH`` with the sources and metadata of a release; fetched if missing.

    Raises:
        subprocess.CalledProcessError: pip cannot download the wheel; its message was printed.
    """

    def fetch(temporary: Path, part: Path) -> None:
        with zipfile.ZipFile(download_wheel(release, temporary / "wheel")) as archive:
            archive.extractall(part, [n for n in archive.namelist() if n.endswith(_KEPT)])

    return fetched_once(cache() / "sources" / release, f"the wheel of vLLM {release}", fetch)


def download_wheel(release: str, to: Path) -> Path:
    """Download the unmodified wheel of a release, whatever platform this is, and return it."""
    tags = ["manylinux1", "manylinux2014", *(f"manylinux_2_{n}" for n in range(17, 40))]
    platforms = [option for tag in tags for option in ("--platform", f"{tag}_x86_64")]
    subprocess.run(
        [
            *(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"),
            *("--only-binary=:all:", "--python-version", "3.12", *platforms),
            *("--dest", str(to), f"vllm=={release}"),
        ],
        check=True,
    )
    (wheel,) = to.glob("vllm-*.whl")
    return wheel


if __name__ == "__main__":
    for name in sys.argv[1:] or RELEASES:
        print(source_dir(name))
