"""Which processors take the second way of row-wise Adagrad."""

from __future__ import annotations

import pytest

from tutorec._kernels.weighted_step import is_zen3


@pytest.mark.parametrize(
    ("vendor", "family", "model", "expected"),
    [
        ("AuthenticAMD", 25, 1, True),  # EPYC 7003
        ("AuthenticAMD", 25, 33, True),  # Ryzen 5000
        ("AuthenticAMD", 25, 17, False),  # EPYC 9004, a Zen 4
        ("AuthenticAMD", 25, 97, False),  # Ryzen 7000, a Zen 4
        ("AuthenticAMD", 23, 49, False),
        ("GenuineIntel", 6, 85, False),
    ],
)
def test_a_zen_3_is_known_by_family_and_model(vendor: str, family: int, model: int, expected: bool) -> None:
    lines = f"processor\t: 0\nvendor_id\t: {vendor}\ncpu family\t: {family}\nmodel\t\t: {model}\nmodel name\t: a name\n"
    assert is_zen3(f"{lines}\n{lines}") is expected


def test_a_system_without_cpuinfo_is_no_zen_3() -> None:
    assert not is_zen3("")
