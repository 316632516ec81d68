"""The library under measurement, by name: a case is written once and runs in both."""

from __future__ import annotations

import gc
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Literal

import torch
from torch import Tensor

from benchmarks.harness import Bar, Comparison, Sample, compare, time_call
from tutorec._validation import validation

OURS = "tutorec"
RATE = 0.01


@dataclass(frozen=True)
class Sizes:
    """Tables of a case, all alike, one feature each, and their batches.

    Args:
        tables: T.
        rows: R.
        columns: D.
        pooling: Mean number of ids in a bag.
    """

    tables: int = 26
    rows: int = 30_000
    columns: int = 64
    pooling: int = 10


# Keys, values and lengths: each library makes its own batch of them.
Batch = tuple[list[str], Tensor, Tensor]


@dataclass(frozen=True)
class Library:
    """Names of a library by path below its root; both libraries have the same paths.

    Example:
        >>> from benchmarks.peer import Library
        >>> Library("tutorec").get("sparse.jagged_tensor.KeyedJaggedTensor").__name__
        'KeyedJaggedTensor'
    """

    root: str

    def get(self, path: str) -> Any:
        """What ``root.path`` is; the last part of the path is a name in a module.

        Raises:
            ImportError: no such module.
            AttributeError: the module lacks the name.
        """
        module, _, name = path.rpartition(".")
        return getattr(self.module(module), name)

    def module(self, path: str) -> Any:
        """The module ``root.path``, even where a package has a function of that name."""
        with warnings.catch_warnings():
            # what a peer warns of at its import concerns nobody here
            warnings.simplefilter("ignore")
            import_module(f"{self.root}.{path}")
        return sys.modules[f"{self.root}.{path}"]


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


def chosen(known: Sequence[str], wanted: Sequence[str] | None, option: str) -> list[str]:
    """The names asked for, in the order known; all when none was asked for.

    Raises:
        ValueError: a name is not known; the message lists those that are.

    Example:
        >>> from benchmarks.peer import chosen
        >>> chosen(["tiny", "mid", "large"], ["mid", "tiny"], "--sizes")
        ['tiny', 'mid']
    """
    unknown = sorted(set(wanted or ()) - set(known))
    if unknown:
        raise ValueError(f"{option} {','.join(unknown)}: there are {', '.join(known)}")
    return [name for name in known if wanted is None or name in wanted]


def chosen_world(known: Sequence[int], wanted: int | None) -> int:
    """How many ranks were asked for; 2 when nobody did.

    Raises:
        ValueError: the benchmark does not run on so many.
    """
    world = wanted or 2
    if world not in known:
        raise ValueError(f"--world {world}: there are {', '.join(map(str, known))}")
    return world


@contextmanager
def on_one_thread() -> Iterator[None]:
    """Run torch on one thread, and on as many as before afterwards."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def finish(result: Tensor) -> None:
    """Wait until a result's device has finished, and read the result's last number.

    Args:
        result: any tensor but an empty one; on the CPU it is there already.
    """
    float(result.detach().flatten()[-1])
    if result.is_cuda:
        torch.cuda.synchronize(result.device)


def time_each(call: Callable[[Any], object], fresh: Sequence[Any]) -> Sample:
    """Mean CPU and wall seconds of a call over objects that were made before the clock started.

    Python's cyclic collector rests meanwhile: it would charge one variant for the garbage of
    another.

    Args:
        call: what is measured.
        fresh: one argument for each call; nothing has looked at any of them.

    Returns:
        Seconds of one call.
    """

    def all_of_them() -> None:
        for one in fresh:
            call(one)

    gc.disable()
    try:
        sample = time_call(all_of_them)
    finally:
        gc.enable()
    return Sample(sample.cpu / len(fresh), sample.wall / len(fresh))


def bag_configs(library: Library, sizes: Sizes) -> list[Any]:
    """Configs of tables ``t0``, ``t1``, ... with a feature each, in a library's class."""
    config = library.get("modules.embedding_configs.EmbeddingBagConfig")
    return [
        config(
            num_embeddings=sizes.rows,
            embedding_dim=sizes.columns,
            name=f"t{i}",
            feature_names=[f"f{i}"],
        )
        for i in range(sizes.tables)
    ]


def bag_collection(library: Library, sizes: Sizes, device: str = "cpu") -> Any:
    """A collection with the same rows in every library; each device has random numbers of its own.

    Args:
        library: Whose class.
        sizes: The tables.
        device: Where they live.
    """
    made = library.get("modules.embedding_modules.EmbeddingBagCollection")
    return fill(made(tables=bag_configs(library, sizes), device=torch.device(device)))


@torch.no_grad()
def fill(collection: Any) -> Any:
    """The same rows in every library, of a collection on any device."""
    weights = [table.weight for table in collection.embedding_bags.values()]
    generator = torch.Generator(weights[0].device).manual_seed(0)
    for weight in weights:
        weight.uniform_(-0.5, 0.5, generator=generator)
    return collection


def look_up_in(collections: dict[str, Any]) -> Callable[[str, Batch], Tensor]:
    """What looks a batch up in the collection of a library, by its name."""
    makers = {
        root: Library(root).get("sparse.jagged_tensor.KeyedJaggedTensor") for root in collections
    }

    @torch.no_grad()
    def look_up(root: str, batch: Batch) -> Tensor:
        keys, values, lengths = batch
        return collections[root](makers[root](keys, values, lengths=lengths)).values()

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
    sizes: Sizes,
    samples: int,
    number: int,
    count: int,
    device: str | torch.device = "cpu",
    rank: int = 0,
) -> list[Batch]:
    """Fresh batches of a round, the same for every variant of it and different on each rank.

    Args:
        sizes: The tables.
        samples: B.
        number: Number of the round.
        count: Batches.
        device: Where they live.
        rank: Whose they are.
    """
    keys = [f"f{i}" for i in range(sizes.tables)]
    batches = []
    for i in range(count):
        seed = 100_000_000 * rank + 1_000_000 + 1000 * number + i
        generator = torch.Generator().manual_seed(seed)
        values, lengths = random_bags(generator, sizes.tables * samples, sizes.pooling, sizes.rows)
        batches.append((keys, values.to(device), lengths.to(device)))
    return batches


def optimizer_words(library: Library, name: str) -> tuple[Any, dict[str, float]]:
    """Class and arguments of the tables' optimizer, ``"sgd"`` or ``"rowwise_adagrad"``."""
    if name == "sgd":
        return torch.optim.SGD, {"lr": RATE}
    return library.get("optim.rowwise_adagrad.RowWiseAdagrad"), {"lr": RATE, "eps": 1e-8}


def fuse_optimizer(library: Library, name: str, collection: Any) -> None:
    """Have a collection's tables stepped during backward, by an optimizer of `optimizer_words`."""
    kind, arguments = optimizer_words(library, name)
    apply = library.get("optim.apply_optimizer_in_backward.apply_optimizer_in_backward")
    apply(kind, collection.parameters(), arguments)


def checked_and_not(
    case: str, sides: Any, measure: Callable[[str, bool], Callable[[int], Sample]]
) -> dict[str, Callable[[int], Sample]]:
    """What is measured of a case: ours with checks and without, the peer, which has none.

    Args:
        case: Its name.
        sides: Libraries, or titles of what is measured.
        measure: Of a title, with or without checks.
    """
    variants: dict[str, Callable[[int], Sample]] = {}
    for side in sides:
        root = side.root if isinstance(side, Library) else side
        if root == OURS:
            variants |= {
                f"{case}: {OURS} checked": measure(root, True),
                f"{case}: {OURS}": measure(root, False),
            }
        else:
            variants[f"{case}: {root}"] = measure(root, False)
    return variants


def judged_both(
    samples: dict[str, list[Sample]],
    case: str,
    peer: str,
    clock: Literal["cpu", "wall"],
    bar: float | None,
    unchecked_only: bool = False,
) -> list[Comparison]:
    """The peer against ours without checks and with them, whichever were measured.

    Args:
        samples: Variant -> measurements.
        case: Its name.
        peer: Title of the peer.
        clock: Which time is judged.
        bar: What peer / ours should be at least; None for what is only shown.
        unchecked_only: Whether the bar is for ours without checks.
    """
    comparisons = []
    for side in (OURS, f"{OURS} checked"):
        if f"{case}: {side}" not in samples:
            continue
        judged = None if bar is None or (unchecked_only and side != OURS) else Bar("at least", bar)
        title = f"{case}: {peer} / {side}"
        pair = f"{case}: {peer}", f"{case}: {side}"
        comparisons.append(compare(samples, *pair, clock, judged, title))
    return comparisons


def timed_calls(
    case: str,
    sides: Any,
    call: Callable[[str, Batch], object],
    batches: Callable[[int], list[Batch]],
) -> dict[str, Callable[[int], Sample]]:
    """What times the calls of a case on fresh batches.

    Args:
        case: Its name.
        sides: Libraries, or titles of what is measured.
        call: What is timed, of a title on a batch.
        batches: Those of a round.
    """

    def measure(title: str, checks: bool) -> Callable[[int], Sample]:
        def sample(number: int) -> Sample:
            with validation(checks):
                return time_each(lambda batch: call(title, batch), batches(number))

        return sample

    return checked_and_not(case, sides, measure)
