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

from benchmarks.harness import (
    Bar,
    Comparison,
    Report,
    Sample,
    interleave,
    machine,
    paired_ratio,
)
from benchmarks.peer import (
    OURS,
    Library,
    checked_and_not,
    chosen,
    judged_both,
    libraries,
    on_one_thread,
    random_bags,
    time_each,
)
from benchmarks.runner import Options
from tutorec._validation import validation

NAME = "kjt"
ROUNDS = 30


@dataclass(frozen=True)
class Size:
    """Features F, samples B, mean ids per bag L; calls per measurement; columns D of a key."""

    features: int
    batch: int
    pooling: int
    repeats: int
    columns: int = 64


@dataclass(frozen=True)
class Input:
    """The tensors of a batch, the same for both libraries; objects are made of them for every call.

    Ids are int64, lengths int32, as TorchRec's own data sets make them.
    """

    size: Size
    keys: list[str]
    values: Tensor
    lengths: Tensor
    offsets: Tensor
    pooled: Tensor


_SIZES = {
    "tiny": Size(2, 2, 3, 200),
    "mid": Size(26, 1024, 10, 10),
    "large": Size(100, 4096, 20, 1),
}
SIZES = tuple(_SIZES)

# what the ratio peer / tutorec should be, where it is not 1.0 (2.0 for tiny inputs)
_BARS = {
    "mid": {"permute": 2.0, "to_dict": 2.5, "split": 4.0, "regroup": 1.7},
    "large": {
        "to_dict": 8.0,
        "split": 4.0,
        "regroup": 1.6,
        "from_jt_dict": 0.97,
        "permute": 0.97,
        "concat": 0.97,
    }
    | {"regroup+shared": 0.97, "td_to_kjt": 0.97},
}
_TINY_BAR, _TINY_MEAN_BAR = 2.0, 3.5

Case = tuple[Callable[[Any], Any], Callable[[Any], object]]


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
    notes = ["every call ends with reading the values, lengths and offsets of its result"]
    if "td_to_kjt" in cases and find_spec("tensordict") is None:
        cases.remove("td_to_kjt")
        notes.append("td_to_kjt was left out: tensordict is not installed")
    samples: dict[str, list[Sample]] = {}
    comparisons: list[Comparison] = []
    with on_one_thread():
        for size in sizes:
            batch = _input(_SIZES[size])
            for case in cases:
                made = {side.root: _CASES[case](side, batch) for side in sides}
                _require_equal(f"{size} {case}", made)
                # one case at a time: what is compared runs moments apart
                variants = _variants(f"{size} {case}", made, _SIZES[size].repeats)
                samples |= interleave(variants, options.rounds, warmup=2)
                if options.vs:
                    tiny = size == "tiny"
                    bar = _BARS.get(size, {}).get(case, _TINY_BAR if tiny else 1.0)
                    comparisons += judged_both(
                        samples, f"{size} {case}", options.vs, "cpu", bar, unchecked_only=tiny
                    )
            if size == "tiny" and options.vs and len(cases) > 1:
                comparisons.append(_geometric_mean(samples, cases, options.vs))
    shapes = {
        size: f"F={s.features} B={s.batch} L={s.pooling}"
        for size, s in _SIZES.items()
        if size in sizes
    }
    return Report(
        name=NAME,
        settings={
            **shapes,
            "threads": 1,
            "ids": "int64",
            "lengths": "int32",
            "objects": "fresh for every call",
        },
        samples=samples,
        comparisons=comparisons,
        context=machine(options.vs),
        notes=notes,
    )


def _input(size: Size) -> Input:
    generator = torch.Generator().manual_seed(size.features)
    bags = size.features * size.batch
    values, lengths = random_bags(generator, bags, size.pooling, 1_000_000)
    offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    pooled = torch.rand(size.batch, size.features * size.columns, generator=generator)
    return Input(
        size, [f"f{i}" for i in range(size.features)], values, lengths.int(), offsets.int(), pooled
    )


def _construct(library: Library, batch: Input) -> Case:
    kjt = library.get("sparse.jagged_tensor.KeyedJaggedTensor")
    return lambda _: _read(kjt(batch.keys, batch.values, lengths=batch.lengths)), lambda _: None


def _construct_synced(library: Library, batch: Input) -> Case:
    kjt = library.get("sparse.jagged_tensor.KeyedJaggedTensor")

    def call(_: object) -> Any:
        made = kjt.from_lengths_sync(batch.keys, batch.values, batch.lengths)
        made.length_per_key()
        made.offset_per_key()
        return _read(made)

    return call, lambda _: None


def _construct_with_offsets(library: Library, batch: Input) -> Case:
    kjt = library.get("sparse.jagged_tensor.KeyedJaggedTensor")
    return lambda _: _read(
        kjt(batch.keys, batch.values, lengths=batch.lengths, offsets=batch.offsets)
    ), lambda _: None


def _from_jt_dict(library: Library, batch: Input) -> Case:
    kjt = library.get("sparse.jagged_tensor.KeyedJaggedTensor")
    jagged = library.get("sparse.jagged_tensor.JaggedTensor")
    counts = batch.lengths.view(len(batch.keys), -1).sum(1).tolist()
    parts = list(
        zip(
            batch.keys,
            batch.values.split(counts),
            batch.lengths.split(batch.size.batch),
            strict=True,
        )
    )
    return lambda d: _read(kjt.from_jt_dict(d)), lambda _: {
        key: jagged(v, lengths=n) for key, v, n in parts
    }


def _on_batch(
    call: Callable[[Any, Input], Any], objects: int = 1
) -> Callable[[Library, Input], Case]:
    """A case whose argument is a fresh KJT with lengths, or a list of KJTs with different keys."""

    def case(library: Library, batch: Input) -> Case:
        kjt = library.get("sparse.jagged_tensor.KeyedJaggedTensor")
        keys = [
            [f"{'abc'[i]}_{key}" for key in batch.keys] if i else batch.keys for i in range(objects)
        ]

        def fresh(_: int) -> Any:
            made = [kjt(list(names), batch.values, lengths=batch.lengths) for names in keys]
            return made[0] if objects == 1 else made

        return lambda one: call(one, batch), fresh

    return case


def _permute(one: Any, batch: Input) -> Any:
    count = len(batch.keys)
    return _read(one.permute([*range(1, count, 2), *range(0, count, 2)]))


def _halves(one: Any, batch: Input) -> Any:
    half = len(batch.keys) // 2
    return _read_each(one.split([half, len(batch.keys) - half]))


def _regroup(shared: bool) -> Callable[[Library, Input], Case]:
    """Two keyed tensors and groups that mix their keys, each key in one or in two groups."""

    def case(library: Library, batch: Input) -> Case:
        keyed = library.get("sparse.jagged_tensor.KeyedTensor")
        half, columns = len(batch.keys) // 2, batch.size.columns
        keys = [batch.keys[:half], batch.keys[half:]]
        widths = [len(names) * columns for names in keys]
        values = [part.contiguous() for part in batch.pooled.split(widths, 1)]
        order, third = batch.keys[1::2] + batch.keys[::2], len(batch.keys) // 3
        groups = [order[third:], order[:third]] if third else [order]
        groups += [[order[-1]]] if shared else []

        def fresh(_: int) -> Any:
            return [
                keyed(list(k), [columns] * len(k), v) for k, v in zip(keys, values, strict=True)
            ]

        return lambda both: keyed.regroup(both, groups), fresh

    return case


def _td_to_kjt(library: Library, batch: Input) -> Case:
    """A TensorDict of one nested jagged tensor for each feature, into one batch."""
    convert = library.get("sparse.tensor_dict.maybe_td_to_kjt")
    tensordict = import_module("tensordict").TensorDict
    rows = batch.size.batch
    cuts = [batch.offsets[i * rows : (i + 1) * rows + 1] for i in range(len(batch.keys))]
    parts = [(batch.values[int(cut[0]) : int(cut[-1])], (cut - cut[0]).long()) for cut in cuts]

    def fresh(_: int) -> Any:
        nested = [
            torch.nested.nested_tensor_from_jagged(values, offsets=offsets)
            for values, offsets in parts
        ]
        return tensordict(dict(zip(batch.keys, nested, strict=True)), batch_size=[rows])

    return lambda one: _read(convert(one, batch.keys)), fresh


_CASES: dict[str, Callable[[Library, Input], Case]] = {
    "construct": _construct,
    "construct+sync": _construct_synced,
    "construct+offsets": _construct_with_offsets,
    "from_jt_dict": _from_jt_dict,
    "to_dict": _on_batch(lambda one, _: _read_each(one.to_dict().values())),
    "getitem": _on_batch(lambda one, batch: _read(one[batch.keys[len(batch.keys) // 2]])),
    "split": _on_batch(lambda one, batch: _read_each(one.split([1] * len(batch.keys)))),
    "split halves": _on_batch(_halves),
    "permute": _on_batch(_permute),
    "concat": _on_batch(lambda two, _: _read(type(two[0]).concat(two)), objects=2),
    "regroup": _regroup(shared=False),
    "regroup+shared": _regroup(shared=True),
    "td_to_kjt": _td_to_kjt,
}
CASES = tuple(_CASES)


def _read(jagged: Any) -> Any:
    """Values, lengths and offsets, so that nothing is left for later."""
    return jagged.values(), jagged.lengths(), jagged.offsets()


def _read_each(many: Any) -> Any:
    return [_read(one) for one in many]


def _require_equal(title: str, made: dict[str, Case]) -> None:
    results = [call(fresh(0)) for call, fresh in made.values()]
    flat = [_flatten(result) for result in results]
    for other in flat[1:]:
        same = len(other) == len(flat[0]) and all(
            torch.equal(a, b) for a, b in zip(flat[0], other, strict=True)
        )
        if not same:
            raise ValueError(f"{title}: {' and '.join(made)} give different tensors; not timed")


def _flatten(result: Any) -> list[Tensor]:
    return (
        [result]
        if isinstance(result, Tensor)
        else [tensor for part in result for tensor in _flatten(part)]
    )


def _variants(
    title: str, made: dict[str, Case], repeats: int
) -> dict[str, Callable[[int], Sample]]:
    def measure(root: str, checks: bool) -> Callable[[int], Sample]:
        call, fresh = made[root]

        def sample(_: int) -> Sample:
            with validation(checks):
                return time_each(call, [fresh(i) for i in range(repeats)])

        return sample

    return checked_and_not(title, list(made), measure)


def _geometric_mean(samples: dict[str, list[Sample]], cases: list[str], peer: str) -> Comparison:
    """The geometric mean over the cases, one for each round."""

    def logarithms(side: str) -> list[list[float]]:
        return [
            [math.log(sample.cpu) for sample in samples[f"tiny {case}: {side}"]] for case in cases
        ]

    theirs, ours = logarithms(peer), logarithms(OURS)
    rounds = range(len(theirs[0]))
    means = [
        math.exp(sum(a[i] - b[i] for a, b in zip(theirs, ours, strict=True)) / len(cases))
        for i in rounds
    ]
    ratio = paired_ratio(means, [1.0] * len(means))
    return Comparison(
        f"tiny, geometric mean: {peer} / {OURS}", "cpu", ratio, Bar("at least", _TINY_MEAN_BAR)
    )
