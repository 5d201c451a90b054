"""What is known of this process: by edited code for the states to tell, and the other way."""

from __future__ import annotations

_runner: str | None = None
_left_alone: dict[str, str] = {}
_releases: dict[str, str | None] = {}


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


def forget_left_alone(fix_id: str) -> None:
    """Forget it, since the fix is taken back."""
    _left_alone.pop(fix_id, None)


def left_alone(fix_id: str) -> str | None:
    """Why an applied fix does nothing in this engine; None if it does."""
    return _left_alone.get(fix_id)


def note_release(fix_id: str, release: str | None) -> None:
    """Remember the release whose sources a fix was decided on; None where that is not known."""
    _releases[fix_id] = release


def release_of(fix_id: str) -> str | None:
    """The release whose sources a fix was decided on, such as ``"0.33.0"``; None if unknown."""
    return _releases.get(fix_id)
