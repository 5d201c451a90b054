"""What edited code of vLLM has learned about this process, for the states to tell."""

from __future__ import annotations

_runner: str | None = None
_left_alone: dict[str, str] = {}


def note_runner(use_v2_model_runner: bool) -> None:
    """Remember which model runner the worker of this process has chosen."""
    global _runner
    _runner = "V2 runner" if use_v2_model_runner else "V1 runner"


def runner() -> str | None:
    """``"V1 runner"`` or ``"V2 runner"``; None while no worker has chosen."""
    return _runner


def note_left_alone(fix_id: str, reason: str) -> None:
    """Remember, and log once, that an applied fix does nothing in this engine, and why."""
    if fix_id not in _left_alone:
        import logging

        _left_alone[fix_id] = reason
        logging.getLogger("vllm.cgfix").warning(
            "vllm-cgfix: %s leaves this engine as it is: %s", fix_id, reason
        )


def left_alone(fix_id: str) -> str | None:
    """Why an applied fix does nothing in this engine; None if it does."""
    return _left_alone.get(fix_id)
