"""Checkpoints for minutes: loads beside savers, kills in the middle of saves, full disks, flipped
bits.

``TUTOREC_SOAK_LOADS`` and ``TUTOREC_SOAK_SAVE_KILLS`` say how many.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from distributed.checkpoint.test_faults import (
    in_a_process_of_its_own,
    load_into_ones,
    save_once_of_two,
    save_with_little_room,
    small_of_two,
)
from distributed.checkpoint_kills import whole_step

from tutorec.distributed.checkpoint import read_info, read_state_dict
from tutorec.distributed.checkpoint.manifest import MANIFEST
from tutorec.errors import CheckpointError

pytestmark = pytest.mark.soak

LOADS = int(os.environ.get("TUTOREC_SOAK_LOADS", "1000"))
KILLS = int(os.environ.get("TUTOREC_SOAK_SAVE_KILLS", "60"))


def test_loads_beside_savers_are_of_one_save_and_never_refused(tmp_path):
    found = in_a_process_of_its_own(f"loads_beside_savers({str(tmp_path)!r}, {LOADS})")
    print(found)
    assert (found["loads"], found["mixed"], found["replaced"]) == (LOADS, 0, 0), found
    assert found["steps"] > LOADS // 20, found


def test_kills_in_the_middle_of_saves_leave_a_whole_checkpoint(tmp_path):
    found = in_a_process_of_its_own(f"drawn_kills({str(tmp_path)!r}, {KILLS}, 7)")
    print({"kills": KILLS, "under way": found["under_way"], "step": found["done"]})
    assert found["done"] >= KILLS and found["under_way"] > KILLS // 10
    assert {killed for killed, _, _ in found["messages"]} == {0, 1}
    for _, _, message in found["messages"]:
        start = (
            f"saving the checkpoint {tmp_path / 'model'} failed in an exchange with the other "
            "ranks, one of which may have ended"
        )
        assert message.startswith(start), message


def test_kills_in_the_middle_of_background_saves_leave_a_whole_checkpoint(tmp_path):
    found = in_a_process_of_its_own(f"managed_kills({str(tmp_path)!r}, {KILLS}, 7)")
    print({"kills": KILLS, "step": found["done"], "most kept": max(found["kept"])})
    assert found["done"] >= KILLS and max(found["kept"]) <= 3


def test_disks_of_every_size_are_told_and_the_old_checkpoint_stays(ranks, tmp_path):
    path, outcomes = tmp_path / "model", []
    for step, room in enumerate(range(0, 880_000, 40_000)):
        ranks(2).run(save_once_of_two, str(path))
        said = ranks(2).run(save_with_little_room, str(path), step % 2, room, "fused")
        assert said[0] == said[1]
        outcomes.append(said[0] == "saved")
        if not outcomes[-1]:
            assert f"failed on rank {step % 2}: OSError: [Errno 27] File too large" in said[0], (
                said[0]
            )
        assert whole_step(path, 1) == (2 if outcomes[-1] else 1)
        assert len(list(path.iterdir())) == 5, "nothing is left behind"
    print({"disks": len(outcomes), "saved": sum(outcomes)})
    assert 0 < sum(outcomes) < len(outcomes)


FLIPS = [("__*.distcp", 50), ("*.index", 50), (MANIFEST, 100)]


@pytest.mark.parametrize(("pattern", "times"), FLIPS, ids=["data", "index", "manifest"])
def test_flipped_bits_are_all_found(ranks, tmp_path, pattern, times):
    path, draw = tmp_path / "model", random.Random(3)
    ranks(2).run(small_of_two, str(path))
    readers: list[Callable[[Path], object]] = [read_state_dict]
    readers += [] if pattern.startswith("__") else [read_info]
    for _ in range(times):
        file = draw.choice(sorted(path.glob(pattern)))
        content = file.read_bytes()
        place, bit = draw.randrange(len(content)), 1 << draw.randrange(8)
        file.write_bytes(content[:place] + bytes([content[place] ^ bit]) + content[place + 1 :])
        for read in readers:
            with pytest.raises(CheckpointError):
                read(path)
        said = ranks(2).run(load_into_ones, str(path))
        assert all(each.startswith(f"loading the checkpoint {path} failed") for each in said), said
        file.write_bytes(content)
    assert ranks(2).run(load_into_ones, str(path)) == ["loaded"] * 2
