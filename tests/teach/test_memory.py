import platform

import pytest
import torch

from tutorec.teach import memory
from tutorec.teach.memory import peak_memory

MEGA = 2**20


def block(mega):
    return torch.ones(mega, MEGA // 4)


def test_peak_is_the_most_that_was_held_at_once():
    with peak_memory() as peak:
        block(100)
        kept = block(40)
        block(48)
    assert 96 * MEGA <= peak.growth <= 132 * MEGA, peak
    del kept


def test_what_was_held_and_freed_before_does_not_count():
    block(200)
    with peak_memory() as peak:
        block(64)
    assert 60 * MEGA <= peak.growth <= 100 * MEGA, peak


@pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc", reason="only glibc gives freed memory back when asked to"
)
def test_small_blocks_that_were_freed_before_count_when_they_are_taken_again():
    block(30)  # glibc keeps blocks of this size from now on
    many = [block(4) for _ in range(20)]
    last = block(1)  # above them, so that the heap cannot shrink
    del many
    with peak_memory() as peak:
        again = [block(4) for _ in range(16)]
    assert 60 * MEGA <= peak.growth <= 80 * MEGA, peak
    del again, last


def test_without_the_system_torch_is_counted(monkeypatch, tmp_path):
    monkeypatch.setattr(memory, "_CLEAR", tmp_path / "missing" / "clear_refs")
    with peak_memory() as peak:
        block(64)
        block(48)
    assert (peak.way, peak.growth) == ("torch", 64 * MEGA)
