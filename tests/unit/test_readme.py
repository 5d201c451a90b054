"""The README's table is what ``vllm-cgfix list --markdown`` prints."""

from __future__ import annotations

from pathlib import Path

from vllm_cgfix import cli

README = Path(__file__).parents[2] / "README.md"


def test_the_table_of_fixes_is_the_commands_output(capsys):
    assert cli.main(["list", "--markdown"]) == 0
    printed = capsys.readouterr().out
    _, rest = README.read_text("utf-8").split(
        "<!-- fixes: the output of `vllm-cgfix list --markdown` -->\n"
    )
    assert rest.split("<!-- end of fixes -->")[0] == printed
