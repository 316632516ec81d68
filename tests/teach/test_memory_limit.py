"""A function under a limit of memory: its result, or the error that says what was short."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import nn

from tutorec.errors import RankError
from tutorec.teach import memory_limit
from tutorec.teach.memory_limit import under_limit

linux = pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA is Linux's")


def total(numbers: int) -> float:
    return float(torch.ones(numbers).sum())


def layer(width: int) -> nn.Module:
    return nn.Linear(width, width)


def fails() -> None:
    raise ValueError("a fault of its own")


@linux
def test_what_fits_is_returned_and_what_does_not_gives_the_error() -> None:
    assert under_limit(64 * 2**20, total, 1000) == 1000.0
    error = under_limit(64 * 2**20, total, 2**26)  # 256 MiB
    assert isinstance(error, str) and "268435456 bytes" in error


@linux
def test_a_rank_that_had_too_little_memory_ends_in_order(capfd: pytest.CaptureFixture[str]) -> None:
    assert "memory" in under_limit(2**20, total, 10**8)
    assert "Traceback" not in capfd.readouterr().err


@linux
def test_what_is_called_first_has_no_limit() -> None:
    assert under_limit(64 * 2**20, total, 1000, first=lambda: torch.ones(2**26).sum()) == 1000.0


def test_of_a_module_its_printed_form_comes_back() -> None:
    assert under_limit(64 * 2**20, layer, 3).startswith("Linear(in_features=3")


def test_another_error_is_raised() -> None:
    with pytest.raises(RankError, match="a fault of its own"):
        under_limit(64 * 2**20, fails)


def test_where_there_is_no_limit_a_note_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(memory_limit, "_STATUS", tmp_path / "none")
    assert under_limit(64 * 2**20, total, 1000) == 1000.0
    assert "no limit" in capsys.readouterr().out


def test_an_error_without_a_text_is_named() -> None:
    assert memory_limit._lacks_memory(MemoryError())
    assert not memory_limit._lacks_memory(RuntimeError("shapes differ"))
