"""The figure of chapter 18: which row each id of a batch reads, and which rows change hands."""

from __future__ import annotations

from tutorec.modules.mc_modules import LFU_EvictionPolicy, MCHManagedCollisionModule
from tutorec.spmd import device
from tutorec.teach import draw
from tutorec.teach.draw import RemappedBatch


def two_batches() -> tuple[RemappedBatch, RemappedBatch]:
    mapping = MCHManagedCollisionModule(3, device(), LFU_EvictionPolicy(), eviction_interval=1)
    return RemappedBatch.of(mapping, [50, 60, 50]), RemappedBatch.of(mapping, [70, 70, 80])


def test_a_batch_is_noted_as_it_was_remapped():
    first, second = two_batches()
    assert (first.before, first.after, first.evicted) == ({}, {0: 50, 1: 60}, {})
    assert (first.rows, first.shared) == ([0, 1, 0], 0)
    assert (second.evicted, second.after) == ({1: 60}, {0: 50, 1: 70})
    assert (second.rows, second.shared) == ([1, 1, 2], 1)


def test_the_figure_counts_all_batches_and_names_the_ids():
    first, second = two_batches()
    chart = draw.remapping(
        {"first": first, "second": second}, claim="{shared} of {ids}, {evicted} evicted"
    )
    assert chart.claim == "1 of 6, 1 evicted"
    texts = [text.get_text() for text in chart.figure.axes[0].texts]
    assert texts.count("50") == 4 and "was 60" in texts and texts.count("all others") == 2
