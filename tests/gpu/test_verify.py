"""``vllm-cgfix verify`` on a machine with a GPU."""

from __future__ import annotations

import pytest

from vllm_cgfix.fixes import CATALOGUE

from . import plan
from .children import Result

pytestmark = [pytest.mark.release(*plan.RELEASES), pytest.mark.core]


@pytest.mark.parametrize("case", [fix.id for fix in CATALOGUE])
@pytest.mark.needs("verify/{case}")
def test_verify(results: list[Result]) -> None:
    (result,) = results
    assert result.exit_code == 0, result.tail
