"""tutorec next to TorchRec: stored results, scripts, and questions that both libraries answer.

A script runs under torchrun. A question is a function that takes a library's root name and returns
a short answer. The library is found by its name when the question is answered, so that nothing here
imports TorchRec. The questions need a process group of one rank.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

PEER = "torchrec"
_CPU = torch.device("cpu")
_ROWS = 10
_COLUMNS = 4
# The stored output is that of a CPU, so a script sees no GPU.
_LAUNCHED = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONWARNINGS": "ignore"}
_OF_GLOO = "[Gloo]"  # torch up to 2.10 prints such lines to the standard output


def stored(name: str) -> dict[str, Any]:
    """What ``make parity`` (``"parity"``) or ``make ratios`` (``"ratios"``) wrote last.

    Example:
        >>> from tutorec.teach import side_by_side
        >>> side_by_side.stored("parity")["versions"]["torchrec"]
        '1.8.0'
    """
    path = Path(__file__).with_name("data") / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8"))


def is_peer_here() -> bool:
    """Whether TorchRec is installed, so that its side can be run and need not be read from a file."""  # noqa: E501
    return find_spec(PEER) is not None


def launch(script: str | Path, *, ranks: int = 2) -> list[str]:
    """What a script prints when torchrun starts it, on the CPU and with one thread for each rank.

    Args:
        script: Its path; it runs in its own folder.
        ranks: W, the number of its processes.

    Returns:
        The printed lines, those of all ranks.

    Raises:
        RuntimeError: It fails; the message has the end of what it wrote to the standard error.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     script = Path(folder, "size.py")
        ...     _ = script.write_text("import os; print(os.environ['WORLD_SIZE'])")
        ...     launch(script, ranks=1)
        ['1']
    """
    path = Path(script).resolve()
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    process = subprocess.run(
        [sys.executable, *torchrun, path.name],
        cwd=path.parent,
        env=os.environ | _LAUNCHED,
        capture_output=True,
        text=True,
        check=False,
    )

    if process.returncode:
        raise RuntimeError(
            f"{path.name} ended with {process.returncode}:\n{process.stderr[-3000:]}"
        )
    return [line for line in process.stdout.splitlines() if not line.startswith(_OF_GLOO)]


def answers(root: str) -> dict[str, str]:
    """Question to the library's answer; a refusal is the name of the error.

    Args:
        root: ``"tutorec"`` or ``"torchrec"``.
    """
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return {question: _asked(ask, root) for question, ask in questions().items()}
    finally:
        logging.disable(logging.NOTSET)


def questions() -> dict[str, Callable[[str], str]]:
    """Question to the function that answers it."""
    return {
        "tables of a collection on the CPU, after it is sharded": _weights,
        "columns of a sharded output, tables a, b, c": _columns,
        "id 10 in a table of 10 rows, sharded": _id_outside,
        "lengths that add up to 2, for 3 ids": _lengths,
        "kernel of a plan written by hand": _kernel,
        "type of a table of data_type=BF16": _half,
        "computations of two calls of wait()": _waits,
        "a plan for CUDA on a machine without it": _cuda_plan,
        "an int8 collection sharded over two devices of a CPU": _served,
    }


def _asked(ask: Callable[[str], str], root: str) -> str:
    try:
        return ask(root)
    except Exception as error:
        return type(error).__name__


def _of(root: str, path: str) -> Any:
    """The name at a path below the root."""
    module, _, name = path.rpartition(".")
    return getattr(import_module(f"{root}.{module}"), name)


def _tables(root: str, names: str, **more: Any) -> Any:
    """An unsharded collection on the CPU with one table for each letter."""
    config = _of(root, "modules.embedding_configs.EmbeddingBagConfig")
    tables = [
        config(
            num_embeddings=_ROWS, embedding_dim=_COLUMNS, name=name, feature_names=[name], **more
        )
        for name in names
    ]

    return _of(root, "modules.embedding_modules.EmbeddingBagCollection")(tables=tables, device=_CPU)


def _batch(root: str, names: str, ids: list[int], lengths: list[int]) -> Any:
    kjt = _of(root, "sparse.jagged_tensor.KeyedJaggedTensor")
    return kjt(list(names), torch.tensor(ids), lengths=torch.tensor(lengths))


def _sharded(
    root: str, collection: Any, per_table: dict[str, Any], device_type: str = "cpu"
) -> Any:
    sharder = _of(root, "distributed.embeddingbag.EmbeddingBagCollectionSharder")(
        {"learning_rate": 0.1}
    )
    plan = _of(root, "distributed.sharding_plan.construct_module_sharding_plan")(
        collection, per_table, sharder, local_size=1, world_size=1, device_type=device_type
    )

    group = dist.group.WORLD
    env = _of(root, "distributed.types.ShardingEnv").from_process_group(group)
    return sharder.shard(collection, plan, env, _CPU)


def _table_wise(root: str, **more: Any) -> Any:
    return _of(root, "distributed.sharding_plan.table_wise")(rank=0, **more)


def _rows(sharded: Any) -> Tensor:
    [value] = sharded.state_dict().values()
    return value.local_shards()[0].tensor


def _weights(root: str) -> str:
    collection = _tables(root, "a")
    before = collection.embedding_bags["a"].weight.detach().clone()
    after = _rows(_sharded(root, collection, {"a": _table_wise(root, compute_kernel="fused")}))
    return "kept" if torch.equal(before, after) else "drawn again"


def _columns(root: str) -> str:
    table_wise = _table_wise(root, compute_kernel="fused")
    column_wise = _of(root, "distributed.sharding_plan.column_wise")
    per_table = {"a": table_wise, "b": column_wise(ranks=[0]), "c": table_wise}
    out = _sharded(root, _tables(root, "abc"), per_table)(_batch(root, "abc", [1, 2, 3], [1, 1, 1]))
    return ", ".join(out.wait().keys())


def _id_outside(root: str) -> str:
    sharded = _sharded(root, _tables(root, "a"), {"a": _table_wise(root, compute_kernel="fused")})
    row = sharded(_batch(root, "a", [_ROWS], [1])).wait().values().detach()
    return "row 0" if torch.equal(row[0], _rows(sharded)[0]) else "another row"


def _lengths(root: str) -> str:
    return f"taken, {len(_batch(root, 'a', [1, 2, 3], [1, 1]).values())} ids"


def _kernel(root: str) -> str:
    collection = _tables(root, "a")
    plan = _of(root, "distributed.sharding_plan.construct_module_sharding_plan")(
        collection, {"a": _table_wise(root)}, local_size=1, world_size=1, device_type="cpu"
    )
    return plan["a"].compute_kernel


def _half(root: str) -> str:
    bf16 = _of(root, "types.DataType").BF16
    return str(_tables(root, "a", data_type=bf16).embedding_bags["a"].weight.dtype).removeprefix(
        "torch."
    )


def _waits(root: str) -> str:
    class Counted(_of(root, "distributed.types.LazyAwaitable")):
        calls = 0

        def _wait_impl(self) -> Tensor:
            Counted.calls += 1
            return torch.zeros(1)

    awaitable = Counted()
    awaitable.wait(), awaitable.wait()
    return str(Counted.calls)


def _cuda_plan(root: str) -> str:
    if torch.cuda.is_available():
        return "there is CUDA here"
    entry = _table_wise(root, compute_kernel="fused")
    sharded = _sharded(root, _tables(root, "a"), {"a": entry}, device_type="cuda")
    return f"placed on {_rows(sharded).device.type}"


def _served(root: str) -> str:
    from torch.ao.quantization import PlaceholderObserver

    collection = _tables(root, "a")
    collection.qconfig = _of(root, "modules.embedding_configs.QuantConfig")(
        activation=PlaceholderObserver.with_args(dtype=torch.float),
        weight=PlaceholderObserver.with_args(dtype=torch.qint8),
    )
    quantized = _of(root, "quant.embedding_modules.EmbeddingBagCollection").from_float(collection)
    env = _of(root, "distributed.types.ShardingEnv").from_local(2, 0)
    _of(root, "distributed.shard._shard_modules")(module=quantized, device=_CPU, env=env)
    return "sharded"
