"""Tables in a file: room is reserved, and parts of them can be kept in memory."""

import sys
from mmap import PAGESIZE
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from tutorec._kernels.caches.row_file import ask_for_pages, keep_in_memory, zeros_in_file


def _mapped(address: int) -> str:
    """What the system says is behind an address: its line of ``/proc/self/maps``."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(number, 16) for number in line.split()[0].split("-"))
        if first <= address < last:
            return line
    raise AssertionError(f"nothing is mapped at {address:#x}")


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux is asked")
def test_a_part_is_in_memory_and_the_rest_stays_in_the_file() -> None:
    table = zeros_in_file(3 * 4096).view(-1, 8)
    table.fill_(1.0)
    part = table[100:1400]  # 32 bytes a row: begins and ends inside pages
    assert keep_in_memory(part)
    inside, outside = table[700].data_ptr(), table[0].data_ptr()
    assert _mapped(inside).split()[4] == "0" and _mapped(outside).split()[4] != "0"
    # zeros, and nothing else
    assert not table[700].any() and bool(table[:100].all()) and bool(table[1400:].all())
    table[100:1400] = 2.0
    assert float(table.sum()) == 8 * (100 + 2 * 1300 + len(table) - 1400)


def test_a_part_smaller_than_a_page_stays_in_the_file() -> None:
    numbers = zeros_in_file(2000)
    numbers.fill_(1.0)
    assert not keep_in_memory(numbers[10:20])
    assert bool(numbers.all())


@pytest.mark.parametrize("columns", [None, 12, 1500])
def test_every_page_of_a_row_is_asked_for_once(columns):
    part = (
        zeros_in_file(90_000)[4:]
        if columns is None
        else zeros_in_file(columns * 60 + 4)[4:].view(-1, columns)
    )
    rows = torch.tensor([0, 1, 41, 42, 43, 58])
    asked, at_once = [], []
    with (
        patch(
            "tutorec._kernels.caches.row_file.madvise",
            return_value=lambda *arguments: asked.append(arguments),
        ),
        patch(
            "tutorec._kernels.caches.row_file._advise_all",
            side_effect=lambda ranges: at_once.extend(ranges.tolist()),
        ),
    ):
        ask_for_pages(part, rows)  # all at once, and since that was not done, one by one
    assert at_once == [[address, length] for address, length, _ in asked]
    size = 4 * (columns or 1)
    bounds = [(part[row].data_ptr(), part[row].data_ptr() + size) for row in rows.tolist()]
    pages = {
        page
        for first, end in bounds
        for page in range(first // PAGESIZE, (end - 1) // PAGESIZE + 1)
    }
    assert [address // PAGESIZE for address, *_ in asked] == sorted(pages)
    assert all(address % PAGESIZE == 0 and length == PAGESIZE for address, length, _ in asked)
    ask_for_pages(part, rows)  # the system takes them
