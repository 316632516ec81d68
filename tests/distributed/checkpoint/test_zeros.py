"""Rows that were never written take no space in a checkpoint, and no memory when it is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from process_memory import bytes_of, measurable, peak_during, resident
from torch import nn
from torch.distributed.checkpoint import FileSystemReader, load

from tutorec._kernels.memory import unwritten_zeros
from tutorec.distributed.checkpoint import load_checkpoint, read_state_dict, save_checkpoint

ROWS, COLUMNS = 1 << 19, 64  # 128 MiB, 32 blocks


class Tables(nn.Module):
    """Two tables of one shape, and a small tensor."""

    def __init__(self, rows: int = ROWS) -> None:
        super().__init__()
        self.first = nn.Parameter(unwritten_zeros((rows, COLUMNS)))
        self.second = nn.Parameter(unwritten_zeros((rows, COLUMNS)))
        self.register_buffer("small", torch.zeros(3))


@torch.no_grad()
def filled() -> Tables:
    tables = Tables()
    tables.first[:1000] = 1.5
    tables.second[400_000] = -2.0
    return tables


def size_of(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir())


def test_zeros_are_written_once(tmp_path: Path) -> None:
    tables, folder = filled(), tmp_path / "saved"
    save_checkpoint(folder, tables)
    # a block of each table that is not zero, and one that is
    assert size_of(folder) < 4 * 4 * 2**20
    other = Tables()
    with torch.no_grad():
        other.first[5000:6000] = 9.0  # what is stored as zero must become zero
        other.small += 1
    load_checkpoint(folder, other)
    for name, value in tables.state_dict().items():
        assert torch.equal(other.state_dict()[name], value), name


def test_torch_reads_zeros_that_were_written_once(tmp_path: Path) -> None:
    tables, folder = filled(), tmp_path / "saved"
    save_checkpoint(folder, tables)
    target = {
        "model": {name: torch.ones_like(value) for name, value in tables.state_dict().items()}
    }
    with pytest.warns(UserWarning, match="torch.distributed is disabled"):
        load(target, storage_reader=FileSystemReader(folder))
    whole = read_state_dict(folder)
    for name, value in tables.state_dict().items():
        assert torch.equal(target["model"][name], value), name
        assert torch.equal(whole["model"][name], value), name


def memory_of_round_trip(folder: str) -> int:
    """Bytes that a process holds at most while it saves and loads 256 MiB of zeros."""
    small = Path(folder) / "small"
    save_checkpoint(small, Tables(1000))
    load_checkpoint(small, Tables(1000))
    tables, other = Tables(), Tables()
    before = resident()

    def round_trip() -> None:
        save_checkpoint(Path(folder) / "saved", tables)
        load_checkpoint(Path(folder) / "saved", other)

    return peak_during(round_trip) - before


@pytest.mark.slow
@pytest.mark.skipif(not measurable(), reason="reads and resets the peak in /proc, which Linux has")
def test_zeros_take_no_memory(tmp_path: Path) -> None:
    peak = bytes_of(f"distributed.checkpoint.test_zeros:memory_of_round_trip({str(tmp_path)!r})")
    assert peak < 64 * 2**20
