"""The closing word on the releases: how many of them are proved, and vLLM's own tests."""

from __future__ import annotations

from collections import defaultdict


def pytest_terminal_summary(terminalreporter) -> None:
    """Count the releases all of whose rows were tested and passed."""
    proved: dict[str, bool] = defaultdict(lambda: True)
    lines = []
    for outcome in ("passed", "failed", "error"):
        for report in terminalreporter.getreports(outcome):
            for name, value in getattr(report, "user_properties", ()):
                if name == "row":
                    proved[value.split()[0]] &= outcome == "passed"
                elif name == "upstream":
                    lines.append(value)
    if proved:
        lines.append(f"{sum(proved.values())} of {len(proved)} releases proved")
    if lines:
        terminalreporter.write_sep("-", "stock sources of vLLM")
        for line in lines:
            terminalreporter.write_line(line)
