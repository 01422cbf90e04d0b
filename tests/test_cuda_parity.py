"""Gate A, bit for bit: the CUDA kernels beside bitsandbytes' own (benchmarks/bitwise_parity.py runs all of it)."""

from __future__ import annotations

import pytest
import torch

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
bitsandbytes = pytest.importorskip("bitsandbytes")

import cuda_parity as parity  # noqa: E402

CASES = [case for case in parity.cases() if max(case.sizes) < 2**24 and case.steps <= 4]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_bitsandbytes_bit_for_bit(case: parity.Case) -> None:
    compared, wrong = parity.compare(case)
    assert compared == len(case.sizes) * (
        1 + (2 if case.bits == 8 else 1) * len(parity.RULES[case.rule].signed)
    )
    assert wrong == {}


def test_a_wrong_association_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    # The comparison can fail: a beta one unit in the last place off.
    rule = parity.HYPERS["adam"]
    beta = float(torch.nextafter(torch.tensor(rule.beta2), torch.tensor(2.0)))
    case = parity.Case("adam", 8, "float32")
    ours = parity.Ours
    monkeypatch.setattr(parity, "Ours", lambda *a: _with(ours(*a), hyper=rule._replace(beta2=beta)))
    assert parity.compare(case)[1]


def _with(target: parity.Ours, **values: object) -> parity.Ours:
    for key, value in values.items():
        setattr(target, key, value)
    return target
