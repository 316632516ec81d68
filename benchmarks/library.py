"""The library under measurement, by name: a row is written once and runs in both."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

OURS = "tutorec"
RATE = 0.01


@dataclass(frozen=True)
class Sizes:
    """Tables, all alike, one feature each, their batches, and calls of a measurement.

    Args:
        tables: T.
        rows: R.
        columns: D.
        pooling: Mean number of ids in a bag.
        samples: B.
        calls: Calls in one measurement, each on a fresh batch.
    """

    tables: int = 26
    rows: int = 30_000
    columns: int = 64
    pooling: int = 10
    samples: int = 256
    calls: int = 2

    def __str__(self) -> str:
        return f"{self.tables} x {self.rows:,} x {self.columns}"

    def keys(self) -> list[str]:
        """Features of the tables."""
        return [f"f{table}" for table in range(self.tables)]


# Keys, values and lengths: each library makes its own batch of them.
Batch = tuple[list[str], Tensor, Tensor]


@dataclass(frozen=True)
class Library:
    """Names of a library by path below its root; both libraries have the same paths.

    Example:
        >>> from benchmarks.library import Library
        >>> Library("tutorec").get("sparse.jagged_tensor.KeyedJaggedTensor").__name__
        'KeyedJaggedTensor'
    """

    root: str

    def get(self, path: str) -> Any:
        """What ``root.path`` is; the last component of the path is a name in a module.

        Raises:
            ImportError: no such module.
            AttributeError: the module lacks the name.
        """
        module, _, name = path.rpartition(".")
        return getattr(self.module(module), name)

    def module(self, path: str) -> Any:
        """The module ``root.path``, even where a package has a function of that name."""
        with warnings.catch_warnings():
            # warnings of a peer at its import do not matter here
            warnings.simplefilter("ignore")
            import_module(f"{self.root}.{path}")
        return sys.modules[f"{self.root}.{path}"]

    @cached_property
    def jagged(self) -> Any:
        """The class of batches of ids."""
        return self.get("sparse.jagged_tensor.KeyedJaggedTensor")

    def batch(self, batch: Batch) -> Any:
        """A batch of ids in the library's class."""
        keys, values, lengths = batch
        return self.jagged(keys, values, lengths=lengths)


def libraries(peer: str | None) -> list[Library]:
    """Ours, and the peer when one is named.

    Raises:
        ValueError: the peer is not installed for this Python.
    """
    if peer is None:
        return [Library(OURS)]
    if find_spec(peer) is None:
        version = sys.version.split()[0]
        raise ValueError(
            f"--vs {peer}: no such package for Python {version}; install it beside {OURS}, or "
            "leave --vs out"
        )

    return [Library(OURS), Library(peer)]


def finish(result: Tensor) -> Tensor:
    """Wait until a result's device has finished, read the result's last number, and return it.

    Args:
        result: any tensor but an empty one; on the CPU it is there already.
    """
    float(result.detach().flatten()[-1])
    if result.is_cuda:
        torch.cuda.synchronize(result.device)
    return result


def bag_configs(library: Library, sizes: Sizes) -> list[Any]:
    """Configs of tables ``t0``, ``t1``, ... with a feature each, in a library's class."""
    config = library.get("modules.embedding_configs.EmbeddingBagConfig")
    return [
        config(
            num_embeddings=sizes.rows,
            embedding_dim=sizes.columns,
            name=f"t{table}",
            feature_names=[key],
        )
        for table, key in enumerate(sizes.keys())
    ]


def bag_collection(library: Library, sizes: Sizes, device: str = "cpu") -> Any:
    """A collection with the same rows in every library; each device has random numbers of its own.

    Args:
        library: Whose class.
        sizes: The tables.
        device: Where they are.
    """
    collection = library.get("modules.embedding_modules.EmbeddingBagCollection")
    return fill(collection(tables=bag_configs(library, sizes), device=torch.device(device)))


@torch.no_grad()
def fill(collection: Any) -> Any:
    """The same rows in every library, of a collection on any device."""
    weights = [table.weight for table in collection.embedding_bags.values()]
    generator = torch.Generator(weights[0].device).manual_seed(0)
    for weight in weights:
        weight.uniform_(-0.5, 0.5, generator=generator)
    return collection


def lookup(library: Library, collection: Any) -> Callable[[Batch], Tensor]:
    """A forward of a collection on a batch that it makes of lists, with its result read."""

    @torch.no_grad()
    def look_up(batch: Batch) -> Tensor:
        return finish(collection(library.batch(batch)).values())

    return look_up


def random_bags(
    generator: torch.Generator, bags: int, mean: int, rows: int
) -> tuple[Tensor, Tensor]:
    """Ids of a table's rows, and the lengths of bags with 0 to twice the mean number of ids.

    Args:
        generator: Draws the lengths, then the ids.
        bags: Number of bags.
        mean: Mean number of ids of a bag.
        rows: R, rows of the table.
    """
    lengths = torch.randint(0, 2 * mean + 1, (bags,), generator=generator)
    return torch.randint(0, rows, (int(lengths.sum()),), generator=generator), lengths


def fresh_batches(
    sizes: Sizes, number: int, device: str | torch.device = "cpu", rank: int = 0
) -> list[Batch]:
    """Fresh batches of a round, the same for every side of it and different on each rank.

    Args:
        sizes: The tables, and how many samples and batches.
        number: Number of the round.
        device: Where they are.
        rank: Whose they are.
    """
    batches = []
    for index in range(sizes.calls):
        seed = 100_000_000 * rank + 1_000_000 + 1000 * number + index
        generator = torch.Generator().manual_seed(seed)
        bags = sizes.tables * sizes.samples
        values, lengths = random_bags(generator, bags, sizes.pooling, sizes.rows)
        batches.append((sizes.keys(), values.to(device), lengths.to(device)))

    return batches


def optimizer_class(library: Library, name: str) -> tuple[Any, dict[str, float]]:
    """Class and arguments of the tables' optimizer: `sgd`, `adagrad` or `rowwise_adagrad`."""
    if name == "sgd":
        return torch.optim.SGD, {"lr": RATE}
    if name == "adagrad":
        return torch.optim.Adagrad, {"lr": RATE, "eps": 1e-8}
    return library.get("optim.rowwise_adagrad.RowWiseAdagrad"), {"lr": RATE, "eps": 1e-8}


def fuse_optimizer(library: Library, name: str, collection: Any) -> None:
    """Step a collection's tables during backward, by an optimizer of `optimizer_class`."""
    optimizer, arguments = optimizer_class(library, name)
    apply = library.get("optim.apply_optimizer_in_backward.apply_optimizer_in_backward")
    apply(optimizer, collection.parameters(), arguments)


def chosen(known: Sequence[str], names: Sequence[str] | None, option: str) -> list[str]:
    """The names of an option, in the order known; all where there are none.

    Raises:
        ValueError: a name is not known; the message lists those that are.

    Example:
        >>> from benchmarks.library import chosen
        >>> chosen(["tiny", "mid", "large"], ["mid", "tiny"], "--sizes")
        ['tiny', 'mid']
    """
    unknown = sorted(set(names or ()) - set(known))
    if unknown:
        raise ValueError(f"{option} {','.join(unknown)}: there are {', '.join(known)}")

    return [name for name in known if names is None or name in names]


def chosen_world(known: Sequence[int], world: int | None) -> int:
    """The number of ranks of an option; 2 where there is none.

    Raises:
        ValueError: the benchmark does not run on so many.
    """
    world = world or 2
    if world not in known:
        raise ValueError(f"--world {world}: there are {', '.join(map(str, known))}")
    return world
