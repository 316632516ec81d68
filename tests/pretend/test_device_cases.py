"""`device_cases` on two pretended GPUs."""

from __future__ import annotations

import json
import re

import pytest
from pretend.boxes import HERE, on_box

CASES = HERE / "device_cases.py"
NAMES = re.findall(r"^def (case_\w+)", CASES.read_text(), flags=re.MULTILINE)


@pytest.fixture(scope="module")
def results() -> dict[str, str]:
    return json.loads(on_box(2, [CASES]))


@pytest.mark.parametrize("name", NAMES)
def test_devices_are_not_mixed(results: dict[str, str], name: str) -> None:
    assert results[name] == "", results[name]
