"""Operations on jagged types, tiny to large, on fresh objects; with --vs beside the peer's."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness import Bar, Comparison, Report, Sample, machine, paired_ratio
from benchmarks.library import OURS, Library, Sizes, chosen, libraries, random_bags
from benchmarks.rows import Row, add_row, against, threads, time_row
from benchmarks.runner import Options

NAME = "kjt"
ROUNDS = 30

# Features F, samples B, mean ids of a bag, calls of a measurement, columns of a key.
_SIZES = {
    "tiny": Sizes(tables=2, samples=2, pooling=3, calls=200),
    "mid": Sizes(tables=26, samples=1024, pooling=10, calls=10),
    "large": Sizes(tables=100, samples=4096, pooling=20, calls=1),
}
SIZES = tuple(_SIZES)

# The ratio peer / tutorec that a case should have, where it is not 1.0 (2.0 for tiny inputs).
_BARS = {
    "mid permute": 2.0,
    "mid to_dict": 2.5,
    "mid split": 4.0,
    "mid regroup": 1.7,
    "large to_dict": 8.0,
    "large split": 4.0,
    "large regroup": 1.6,
    "large from_jt_dict": 0.97,
    "large permute": 0.97,
    "large concat": 0.97,
    "large regroup+shared": 0.97,
    "large td_to_kjt": 0.97,
}
_TINY_BAR = 2.0
_TINY_MEAN_BAR = 3.5


@dataclass(frozen=True)
class Lists:
    """The tensors of a batch, the same for both libraries; objects are made of them for every call.

    Ids are int64, lengths int32, as TorchRec's own data sets make them.
    """

    sizes: Sizes
    keys: list[str]
    values: Tensor
    lengths: Tensor
    offsets: Tensor
    pooled: Tensor


# What is timed, and what makes a fresh argument of it.
Case = tuple[Callable[[Any], Any], Callable[[], object]]


def run(options: Options) -> Report:
    """Measure every operation at every size, one thread, checks on and off.

    Args:
        options: rounds, the peer, and which ``--sizes`` and ``--cases``.

    Returns:
        CPU seconds of one call; with a peer the ratios with their bars.

    Raises:
        ValueError: the peer is not installed, an unknown size or case, or the libraries' results
            differ.
    """
    sides = libraries(options.vs)
    sizes = chosen(SIZES, options.sizes, "--sizes")
    cases = chosen(CASES, options.cases, "--cases")
    settings = {"ids": "int64", "lengths": "int32", "objects": "fresh for every call"}
    report = Report(NAME, settings, context=machine(options.vs))
    report.notes.append(
        "every call ends with reading the values, lengths and offsets of its result"
    )
    if "td_to_kjt" in cases and find_spec("tensordict") is None:
        cases.remove("td_to_kjt")
        report.notes.append("td_to_kjt was left out: tensordict is not installed")

    with threads():
        for size in sizes:
            shape = options.fit(_SIZES[size])
            settings[size] = f"F={shape.tables} B={shape.samples} L={shape.pooling}"
            lists = _draw(shape)
            for case in cases:
                _run_case(report, sides, lists, size, case, options)
            if size == "tiny" and options.vs and len(cases) > 1:
                report.comparisons.append(_geometric_mean(report.samples, cases, options.vs))
    return report


def _run_case(
    report: Report, sides: list[Library], lists: Lists, size: str, case: str, options: Options
) -> None:
    name = f"{size} {case}"
    calls: dict[str, Callable[[Any], Any]] = {}
    makers: dict[str, Callable[[], object]] = {}
    for side in sides:
        calls[side.root], makers[side.root] = _CASES[case](side, lists)

    def inputs(side: str, _: int) -> list[object]:
        return [makers[side]() for _ in range(lists.sizes.calls)]

    timed = time_row(Row(name, calls, inputs, most=0.0), options.rounds)
    tiny = size == "tiny"
    bars = against(options.vs, _BARS.get(name, _TINY_BAR if tiny else 1.0))
    add_row(report, name, timed, bars, judge_checked=not tiny)


def _draw(sizes: Sizes) -> Lists:
    generator = torch.Generator().manual_seed(sizes.tables)
    bags = sizes.tables * sizes.samples
    values, lengths = random_bags(generator, bags, sizes.pooling, 1_000_000)
    offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    pooled = torch.rand(sizes.samples, sizes.tables * sizes.columns, generator=generator)
    return Lists(sizes, sizes.keys(), values, lengths.int(), offsets.int(), pooled)


def _construct(library: Library, lists: Lists) -> Case:
    kjt = library.jagged
    return lambda _: _read(kjt(lists.keys, lists.values, lengths=lists.lengths)), lambda: None


def _construct_synced(library: Library, lists: Lists) -> Case:
    kjt = library.jagged

    def call(_: object) -> Any:
        batch = kjt.from_lengths_sync(lists.keys, lists.values, lists.lengths)
        batch.length_per_key()
        batch.offset_per_key()
        return _read(batch)

    return call, lambda: None


def _construct_with_offsets(library: Library, lists: Lists) -> Case:
    kjt = library.jagged

    def call(_: object) -> Any:
        return _read(kjt(lists.keys, lists.values, lengths=lists.lengths, offsets=lists.offsets))

    return call, lambda: None


def _from_jt_dict(library: Library, lists: Lists) -> Case:
    kjt = library.jagged
    jagged = library.get("sparse.jagged_tensor.JaggedTensor")
    counts = lists.lengths.view(len(lists.keys), -1).sum(1).tolist()
    values = lists.values.split(counts)
    lengths = lists.lengths.split(lists.sizes.samples)

    def fresh() -> dict[str, Any]:
        rows = zip(lists.keys, values, lengths, strict=True)
        return {key: jagged(ids, lengths=counts) for key, ids, counts in rows}

    return lambda features: _read(kjt.from_jt_dict(features)), fresh


def _on_batch(
    call: Callable[[Any, list[str]], Any], count: int = 1
) -> Callable[[Library, Lists], Case]:
    """A case whose argument is a fresh KJT with lengths, or a list of KJTs with different keys."""

    def case(library: Library, lists: Lists) -> Case:
        kjt = library.jagged
        keys = [lists.keys]
        keys += [[f"{number}_{key}" for key in lists.keys] for number in range(1, count)]

        def fresh() -> Any:
            batches = [kjt(list(names), lists.values, lengths=lists.lengths) for names in keys]
            return batches[0] if count == 1 else batches

        return lambda argument: call(argument, lists.keys), fresh

    return case


def _to_dict(batch: Any, keys: list[str]) -> Any:
    return [_read(jagged) for jagged in batch.to_dict().values()]


def _getitem(batch: Any, keys: list[str]) -> Any:
    return _read(batch[keys[len(keys) // 2]])


def _split(batch: Any, keys: list[str]) -> Any:
    return [_read(single) for single in batch.split([1] * len(keys))]


def _split_halves(batch: Any, keys: list[str]) -> Any:
    half = len(keys) // 2
    return [_read(side) for side in batch.split([half, len(keys) - half])]


def _permute(batch: Any, keys: list[str]) -> Any:
    order = [*range(1, len(keys), 2), *range(0, len(keys), 2)]
    return _read(batch.permute(order))


def _concat(batches: Any, keys: list[str]) -> Any:
    return _read(type(batches[0]).concat(batches))


def _regroup(shared: bool) -> Callable[[Library, Lists], Case]:
    """Two keyed tensors and groups that mix their keys, each key in one or in two groups."""

    def case(library: Library, lists: Lists) -> Case:
        keyed = library.get("sparse.jagged_tensor.KeyedTensor")
        columns = lists.sizes.columns
        half = len(lists.keys) // 2
        keys = [lists.keys[:half], lists.keys[half:]]
        widths = [len(names) * columns for names in keys]
        values = [block.contiguous() for block in lists.pooled.split(widths, 1)]

        order = lists.keys[1::2] + lists.keys[::2]
        third = len(lists.keys) // 3
        groups = [order[third:], order[:third]] if third else [order]
        groups += [[order[-1]]] if shared else []

        def fresh() -> Any:
            blocks = zip(keys, values, strict=True)
            return [keyed(list(names), [columns] * len(names), block) for names, block in blocks]

        return lambda both: keyed.regroup(both, groups), fresh

    return case


def _td_to_kjt(library: Library, lists: Lists) -> Case:
    """A TensorDict of one nested jagged tensor for each feature, into one batch."""
    convert = library.get("sparse.tensor_dict.maybe_td_to_kjt")
    tensordict = import_module("tensordict").TensorDict
    nested = torch.nested.nested_tensor_from_jagged
    samples = lists.sizes.samples

    features = {}
    for index, key in enumerate(lists.keys):
        ends = lists.offsets[index * samples : (index + 1) * samples + 1]
        features[key] = lists.values[int(ends[0]) : int(ends[-1])], (ends - ends[0]).long()

    def fresh() -> Any:
        jagged = {key: nested(ids, offsets=ends) for key, (ids, ends) in features.items()}
        return tensordict(jagged, batch_size=[samples])

    return lambda batch: _read(convert(batch, lists.keys)), fresh


_CASES: dict[str, Callable[[Library, Lists], Case]] = {
    "construct": _construct,
    "construct+sync": _construct_synced,
    "construct+offsets": _construct_with_offsets,
    "from_jt_dict": _from_jt_dict,
    "to_dict": _on_batch(_to_dict),
    "getitem": _on_batch(_getitem),
    "split": _on_batch(_split),
    "split halves": _on_batch(_split_halves),
    "permute": _on_batch(_permute),
    "concat": _on_batch(_concat, count=2),
    "regroup": _regroup(shared=False),
    "regroup+shared": _regroup(shared=True),
    "td_to_kjt": _td_to_kjt,
}
CASES = tuple(_CASES)


def _read(jagged: Any) -> Any:
    """Values, lengths and offsets, so that nothing is left for later."""
    return jagged.values(), jagged.lengths(), jagged.offsets()


def _geometric_mean(samples: dict[str, list[Sample]], cases: list[str], peer: str) -> Comparison:
    """The geometric mean over the cases, one for each round."""
    logarithms: list[list[float]] = []
    for case in cases:
        theirs = samples[f"tiny {case}: {peer}"]
        ours = samples[f"tiny {case}: {OURS}"]
        pairs = zip(theirs, ours, strict=True)
        logarithms.append([math.log(their.cpu / our.cpu) for their, our in pairs])

    means = [math.exp(sum(logs) / len(cases)) for logs in zip(*logarithms, strict=True)]
    ratio = paired_ratio(means, [1.0] * len(means))
    bar = Bar("at least", _TINY_MEAN_BAR)
    return Comparison(f"tiny, geometric mean: {peer} / {OURS}", "cpu", ratio, bar)
