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


def test_without_the_system_torch_is_counted(monkeypatch, tmp_path):
    monkeypatch.setattr(memory, "_CLEAR", tmp_path / "missing" / "clear_refs")
    with peak_memory() as peak:
        block(64)
        block(48)
    assert (peak.way, peak.growth) == ("torch", 64 * MEGA)
