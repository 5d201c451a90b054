"""Build ``vllm_cgfix/releases.json`` out of the wheels.

    python -m tests.releases.table                  # rewrite the table
    python -m tests.releases.table --check          # fail where it is out of date
    python -m tests.releases.table --compare 0.34.0 # what a new release changes, fix by fix

The table holds the hash of every file that a fix edits or relies on, in every supported release.
Which releases *need* a fix is not in it: that stands in the fix, and ``tests/releases`` proves it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
from pathlib import Path

import vllm_cgfix
from vllm_cgfix.decision import ABSENT
from vllm_cgfix.fixes import CATALOGUE

from .sources import RELEASES, source_dir

TABLE = Path(__file__).parents[2] / "vllm_cgfix" / "releases.json"
PATHS = sorted({path for fix in CATALOGUE for path in (*fix.edited_files, *fix.witnesses)})


def file_hash(release: str, path: str) -> str:
    """The SHA-256 of a file in a release, or ``ABSENT``."""
    file = source_dir(release) / path
    return hashlib.sha256(file.read_bytes()).hexdigest() if file.exists() else ABSENT


def build(releases: tuple[str, ...] = RELEASES) -> str:
    """The text of the table."""
    files: dict[str, dict[str, list[str]]] = {}
    for path in PATHS:
        by_hash = files.setdefault(path, {})
        for release in releases:
            by_hash.setdefault(file_hash(release, path), []).append(release)
    return json.dumps({"releases": list(releases), "files": files}, indent=1) + "\n"


def compare(release: str) -> list[str]:
    """Sentences on what a new release changes for each fix, against the newest in the table."""
    newest = RELEASES[-1]
    lines = []
    for fix in CATALOGUE:
        changed = {
            kind: [path for path in paths if file_hash(release, path) != file_hash(newest, path)]
            for kind, paths in (("edited", fix.edited_files), ("witness", fix.witnesses))
        }
        if not any(changed.values()):
            lines.append(f"{fix.id}: no file changed since {newest}; its row is that of {newest}")
        for kind, paths in changed.items():
            for path in paths:
                gone = " (it is gone)" if file_hash(release, path) == ABSENT else ""
                lines.append(f"{fix.id}: {kind} file {path} changed since {newest}{gone}")
    lines.append(
        f"Next: add {release} to RELEASES in tests/releases/sources.py, run "
        "`python -m tests.releases.table`, then `tox run -e tests -- tests/releases` proves or "
        "refutes its row."
    )
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="change nothing, exit 1 if outdated")
    parser.add_argument("--compare", metavar="RELEASE", help="show what a new release changes")
    arguments = parser.parse_args()
    if arguments.compare:
        try:
            print("\n".join(compare(arguments.compare)))
        except subprocess.CalledProcessError:
            print(f"no wheel of vLLM {arguments.compare} could be downloaded", file=sys.stderr)
            return 2
        return 0
    text = build()
    if arguments.check:
        current = TABLE.exists() and TABLE.read_text("utf-8") == text
        if not current:
            print(f"{TABLE.name} is not what the wheels give: run python -m tests.releases.table")
        return 0 if current else 1
    TABLE.write_text(text, "utf-8")
    print(f"{TABLE}: {len(PATHS)} files of {len(RELEASES)} releases, {len(text)} bytes")
    installed = Path(vllm_cgfix.__file__).with_name(TABLE.name)
    if installed != TABLE:
        print(f"the installed vllm_cgfix reads {installed}: install it anew", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
