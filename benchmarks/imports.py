"""Cold start: torch, tutorec and a peer in new processes, import alone and with a forward."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable

from benchmarks.harness import (
    Bar,
    Comparison,
    Report,
    Sample,
    compare,
    interleave,
    machine,
    time_command,
)
from benchmarks.library import OURS, libraries
from benchmarks.runner import Options

NAME = "import"
ROUNDS = 30

# One script for both; only the root's name differs.
_FORWARD = """
import torch
from {root} import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
tables = [EmbeddingBagConfig(num_embeddings=100, embedding_dim=8, name="t_item", feature_names=["item"])]
collection = EmbeddingBagCollection(tables=tables)
weight = collection.embedding_bags["t_item"].weight
with torch.no_grad():
    weight.copy_(torch.arange(weight.numel()).view_as(weight) % 7)
batch = KeyedJaggedTensor(keys=["item"], values=torch.tensor([7, 1, 7]), lengths=torch.tensor([2, 0, 1]))
pooled = collection(batch)
print(pooled.keys(), pooled.values().tolist())
"""  # noqa: E501


def run(options: Options) -> Report:
    """Measure cold starts; with ``--vs`` the peer runs the same scripts.

    Args:
        options: rounds, and the peer's name.

    Returns:
        CPU and wall seconds of whole processes, and the ratios with their bars.

    Raises:
        ValueError: the peer is not installed for this Python, or its forward gives another result.
    """
    scripts = {
        "import torch": "import torch",
        f"import {OURS}": f"import {OURS}",
        f"{OURS}, first forward": _FORWARD.format(root=OURS),
    }
    if options.vs is not None:
        scripts |= _peer_scripts(options.vs)
    with tempfile.TemporaryDirectory() as folder:
        # an empty folder: nothing in it can shadow a package
        variants = {title: _cold(script, folder) for title, script in scripts.items()}
        samples = interleave(variants, options.rounds)

    return Report(
        name=NAME,
        settings={"process": "new for every sample"},
        samples=samples,
        comparisons=_comparisons(samples, options.vs),
        context=machine(options.vs),
    )


def _peer_scripts(peer: str) -> dict[str, str]:
    """The peer's scripts, after a check that it is there and gives the same result."""
    libraries(peer)
    ours = _output(_FORWARD.format(root=OURS))
    theirs = _output(_FORWARD.format(root=peer))
    if ours != theirs:
        raise ValueError(f"the first forward differs: {OURS} gives {ours}, {peer} gives {theirs}")

    return {
        f"import {peer}": f"import {peer}",
        f"{peer}, first forward": _FORWARD.format(root=peer),
    }


def _comparisons(samples: dict[str, list[Sample]], peer: str | None) -> list[Comparison]:
    comparisons = [
        compare(samples, f"import {OURS}", "import torch", bar=Bar("at most", 1.15)),
        compare(samples, f"import {OURS}", "import torch", clock="wall"),
        compare(samples, f"{OURS}, first forward", "import torch"),
    ]
    if peer is not None:
        for case, bar in (("import {}", 1.9), ("{}, first forward", 1.5)):
            titles = (case.format(peer), case.format(OURS))
            comparisons.append(compare(samples, *titles, bar=Bar("at least", bar)))
            comparisons.append(compare(samples, *titles, clock="wall"))
    return comparisons


def _cold(script: str, folder: str) -> Callable[[int], Sample]:
    return lambda _: time_command([sys.executable, "-c", script], cwd=folder)


def _output(script: str) -> str:
    process = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    if process.returncode:
        raise ValueError(f"the first forward fails:\n{process.stderr.strip()}")
    return process.stdout.strip()
