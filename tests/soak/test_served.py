"""Served models and plans under damage: flipped bits, writers that are killed, plans that are
changed at random.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from inference.served_models import dlrm, inputs
from torch import nn

from tutorec._kernels.backend import operator_libraries
from tutorec.distributed.core.env import ShardingEnv
from tutorec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from tutorec.distributed.plan.plan import ShardingPlan
from tutorec.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    row_wise,
    table_wise,
)
from tutorec.inference.cpp_loader import build_loader, missing_tools
from tutorec.inference.export import export_model, load_exported, save_exported
from tutorec.inference.scripting import load_scripted, save_scripted, script_model
from tutorec.inference.serving import request_of, tensors_to_text, with_tensor_inputs
from tutorec.modules.embedding_configs import EmbeddingBagConfig
from tutorec.modules.embedding_modules import EmbeddingBagCollection
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor
from tutorec.spmd import device

pytestmark = [pytest.mark.soak, pytest.mark.timeout(600)]
FLIPS, KILLS, CHANGES = 50, 12, 400
compiled = pytest.mark.skipif(missing_tools() is not None, reason=str(missing_tools()))


def writer_of(kind: str, path: Path) -> tuple[Callable[[], None], nn.Module]:
    """What writes a model to the path, and the model."""
    if kind == "scripted":
        served = with_tensor_inputs(dlrm("quantized"), inputs(2))
        scripted = script_model(served)
        return lambda: save_scripted(scripted, path), served
    program = export_model(dlrm("quantized"), inputs(4))
    return lambda: save_exported(program, path), dlrm("quantized")


def flipped(data: bytes, path: Path, refused: Callable[[], bool]) -> int:
    """Of so many files with one flipped bit, how many are not refused."""
    drawn = random.Random(0)
    answered = 0
    for _ in range(FLIPS):
        bit = drawn.randrange(8 * len(data))
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        answered += not refused()
    return answered


def raises(load: Callable[[], object]) -> bool:
    try:
        load()
    except ValueError:
        return True
    return False


@pytest.mark.parametrize(
    ("kind", "load"), [("scripted", load_scripted), ("exported", load_exported)]
)
def test_no_flipped_bit_is_answered(
    kind: str, load: Callable[[Path], object], tmp_path: Path
) -> None:
    path = tmp_path / ("model.pt" if kind == "scripted" else "model.pt2")
    writer_of(kind, path)[0]()
    data = path.read_bytes()
    load(path)
    assert flipped(data, path, lambda: raises(lambda: load(path))) == 0


@compiled
def test_no_flipped_bit_is_answered_by_the_loader_in_cpp(tmp_path: Path) -> None:
    path, request = tmp_path / "model.pt", tmp_path / "request.txt"
    write, served = writer_of("scripted", path)
    write()
    request.write_text(tensors_to_text(request_of(served, *inputs(3))) + "\n")
    command = [str(build_loader()), str(path), str(request), *operator_libraries()]

    def refused() -> bool:
        return subprocess.run(command, capture_output=True, check=False).returncode != 0

    assert not refused()
    assert flipped(path.read_bytes(), path, refused) == 0


WRITER = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from soak.test_served import writer_of
write, _ = writer_of(sys.argv[2], Path(sys.argv[3]))
print("ready", flush=True)
while True:
    write()
"""


@pytest.mark.parametrize(
    ("kind", "load"), [("scripted", load_scripted), ("exported", load_exported)]
)
def test_a_writer_that_is_killed_leaves_a_whole_file(
    kind: str, load: Callable[[Path], object], tmp_path: Path
) -> None:
    path, drawn = tmp_path / ("model.pt" if kind == "scripted" else "model.pt2"), random.Random(0)
    writer_of(kind, path)[0]()
    for _ in range(KILLS):
        before = path.stat().st_ino
        command = [
            sys.executable,
            "-W",
            "ignore",
            "-c",
            WRITER,
            str(Path(__file__).parents[1]),
            kind,
            str(path),
        ]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as writer:
            assert writer.stdout is not None
            assert writer.stdout.readline() == b"ready\n"
            # It writes without a pause; it is killed somewhere in the file after the first that it
            # has finished.
            while path.stat().st_ino == before:
                os.sched_yield()
            for _ in range(drawn.randrange(20_000)):
                os.sched_yield()
            writer.send_signal(signal.SIGKILL)
        load(path)


TABLES = [
    EmbeddingBagConfig(16, 8, name, feature_names=[name]) for name in ("item", "user", "shop")
]


def changed(document: Any, drawn: random.Random) -> None:
    """Change one value, key or length of a JSON document, anywhere in it."""
    holders = [document]
    for holder in holders:
        values = holder.values() if isinstance(holder, dict) else holder
        holders += [value for value in values if isinstance(value, dict | list) and value]
    holder = drawn.choice(holders)
    key = drawn.choice(list(holder)) if isinstance(holder, dict) else drawn.randrange(len(holder))
    odd = [
        None,
        -1,
        0,
        1,
        2,
        3,
        7,
        8,
        16,
        2**31,
        2**63,
        1e308,
        True,
        "",
        "rank:1/cpu",
        "row_wise",
        [],
        {},
        [[]],
    ]
    action = drawn.choice(["replace", "replace", "drop", "repeat"])
    if action == "replace":
        holder[key] = drawn.choice(odd)
    elif action == "drop":
        del holder[key]
    elif isinstance(holder, dict):
        holder[f"{key}2"] = holder[key]
    else:
        holder.append(holder[key])


def apply_plans(rank: int, world_size: int, texts: list[str]) -> list[str]:
    """What became of each plan: "refused", "equal" or what went wrong."""
    torch.manual_seed(0)
    ebc = EmbeddingBagCollection(TABLES).to(device())
    ids = torch.randint(0, 16, (12,), generator=torch.Generator().manual_seed(rank))
    batch = KeyedJaggedTensor(["item", "user", "shop"], ids, lengths=torch.full((6,), 2)).to(
        device()
    )
    expected = ebc(batch).values()
    found = []
    for text in texts:
        try:
            plan = ShardingPlan.from_json(text).plan[""]
            env = ShardingEnv.from_process_group(torch.distributed.group.WORLD)
            sharded = EmbeddingBagCollectionSharder().shard(ebc, plan, env)
            pooled = sharded(batch).values()
            found.append("equal" if torch.allclose(pooled, expected) else f"wrong: {text}")
        except (ValueError, KeyError, TypeError) as error:  # AgreementError is a ValueError
            found.append("refused" if str(error) else f"without a word: {text}")
    return found


def test_plans_that_are_changed_at_random_are_refused_or_right(ranks: Callable[..., Any]) -> None:
    words = {"item": table_wise(rank=1), "user": row_wise(), "shop": column_wise(ranks=[0, 1])}
    plan = construct_module_sharding_plan(
        EmbeddingBagCollection(TABLES), words, local_size=2, world_size=2, device_type="cpu"
    )
    whole, drawn, texts = ShardingPlan({"": plan}).to_json(), random.Random(0), []
    for _ in range(CHANGES):
        document = json.loads(whole)
        for _ in range(drawn.randrange(1, 4)):
            changed(document, drawn)
        texts.append(json.dumps(document))
    for of_rank in ranks(2).run(apply_plans, texts=texts):
        assert [one for one in of_rank if one not in ("refused", "equal")] == []
        assert of_rank.count("refused") > CHANGES // 2
