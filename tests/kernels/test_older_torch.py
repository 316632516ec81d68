"""Branches on torch's version: which version counts as older, and what is counted for it."""

import os
import weakref

import pytest
import torch
from torch import tensor

from tutorec._kernels import older_torch


@pytest.mark.parametrize(
    ("version", "minor"),
    [
        ("2.8.0+cu128", (2, 8)),
        ("2.10.1", (2, 10)),
        ("2.13.0+cpu", (2, 13)),
        ("2.14.0.dev20260601", (2, 14)),
    ],
)
def test_a_version_is_compared_by_its_numbers(version: str, minor: tuple[int, int]):
    assert older_torch._minor(version) == minor


def test_rows_are_counted_as_they_are_by_offsets():
    offsets = tensor([0, 2, 2, 5, 5, 6, 9], dtype=torch.int32)
    assert older_torch.counts_of_rows(offsets, 3) == [2, 3, 4]
    assert older_torch.counts_of_rows(torch.zeros(7, dtype=torch.int64), 2) == [0, 0]


def test_nothing_is_counted_so_outside_an_export():
    assert not older_torch.exports_counts()


@pytest.mark.parametrize("older", [True, False])
def test_what_an_older_gloo_prints_is_not_shown(older, monkeypatch, capfd):
    monkeypatch.setattr(older_torch, "BEFORE_2_11", older)
    print("before")
    with older_torch.gloo_connects_silently():
        os.write(1, b"[Gloo] Rank 0 is connected\n")
    os.write(1, b"after\n")
    lines = capfd.readouterr().out.splitlines()
    assert ("[Gloo] Rank 0 is connected" in lines) is not older
    assert lines[0] == "before" and lines[-1] == "after"


def test_an_older_writer_keeps_no_block_that_it_has_written(monkeypatch):
    monkeypatch.setattr(older_torch, "BEFORE_2_11", True)
    block = torch.zeros(4)
    block.itself = block  # as an older torch.save leaves it
    left = weakref.ref(block)
    del block
    older_torch.forget_written_block()
    assert left() is None
