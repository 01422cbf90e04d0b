"""What `break_contracts.py` would edit is still there; running it takes a quarter of an hour, and is done by hand."""

from __future__ import annotations

import pytest
from break_contracts import BREAKAGES, CONTRACTS, ROOT, Breakage


@pytest.mark.parametrize("breakage", BREAKAGES, ids=lambda breakage: f"{breakage.contract}-{breakage.what}")
def test_a_breakage_follows_the_code(breakage: Breakage) -> None:
    assert breakage.contract in CONTRACTS
    for edit in breakage.edits:
        assert (ROOT / edit.file).read_text().count(edit.old) == 1, edit.file
        assert edit.old != edit.new
