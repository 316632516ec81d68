"""JaggedTensor, KeyedJaggedTensor and KeyedTensor: construction, operations, printed forms,
equality.
"""

from __future__ import annotations

from typing import Any

from registry import case, filled, jagged, numbers, of


def jagged_tensor(root: str, **parts: Any) -> Any:
    return of(root, "sparse.jagged_tensor").JaggedTensor(**parts)


def variable(root: str, weighted: bool = True) -> Any:
    """Three features with 2, 0 and 4 samples."""
    import torch

    return of(root, "sparse.jagged_tensor").KeyedJaggedTensor(
        keys=["item", "shop", "user"],
        values=torch.tensor([7, 8, 4, 5, 1, 1, 9]),
        weights=torch.tensor([0.5, 1.0, 2.0, 1.5, 1.0, 0.25, 3.0]) if weighted else None,
        lengths=torch.tensor([2, 0, 1, 1, 0, 3]),
        stride_per_key_per_rank=[[2], [0], [4]],
    )


def shared(root: str, keys: list[str]) -> Any:
    """Two features with 4 and 2 samples that a batch of 5 shares."""
    import torch

    return of(root, "sparse.jagged_tensor").KeyedJaggedTensor(
        keys=keys,
        values=torch.tensor([4, 5, 1, 1, 3, 7, 8]),
        lengths=torch.tensor([1, 1, 0, 3, 2, 0]),
        stride_per_key_per_rank=[[4], [2]],
        inverse_indices=(keys, torch.tensor([[0, 1, 2, 3, 3], [0, 1, 1, 0, 0]])),
    )


def parts_of(kjt: Any) -> Any:
    weights = kjt.weights_or_none()
    return {
        "keys": kjt.keys(),
        "values": kjt.values().tolist(),
        "lengths": kjt.lengths().tolist(),
        # of no features torchrec has [], tutorec [0]
        "offsets": kjt.offsets().tolist() if kjt.keys() else [],
        "weights": None if weights is None else numbers(weights),
        "stride": kjt.stride(),
        "stride_per_key": kjt.stride_per_key(),
        "variable": kjt.variable_stride_per_key(),
        "length_per_key": kjt.length_per_key(),
        "offset_per_key": kjt.offset_per_key(),
    }


def jagged_parts(jt: Any) -> Any:
    weights = jt.weights_or_none()
    dtypes = [str(jt.values().dtype), str(jt.lengths().dtype), str(jt.offsets().dtype)]
    lists = [jt.values().tolist(), jt.lengths().tolist(), jt.offsets().tolist()]
    return [lists, None if weights is None else numbers(weights), dtypes]


@case
def jagged_tensor_lists(root: str) -> Any:
    import torch

    jt = of(root, "sparse.jagged_tensor").JaggedTensor(
        values=torch.tensor([1.0, 2.0, 3.0]), lengths=torch.tensor([2, 0, 1])
    )
    return {
        "dense": [x.tolist() for x in jt.to_dense()],
        "offsets": jt.offsets().tolist(),
        "text": str(jt),
    }


@case
def jagged_tensor_padded(root: str) -> Any:
    import torch

    jt = of(root, "sparse.jagged_tensor").JaggedTensor(
        values=torch.tensor([1.0, 2.0, 3.0]), lengths=torch.tensor([2, 0, 1])
    )
    return [
        jt.to_padded_dense().tolist(),
        jt.to_padded_dense(desired_length=3, padding_value=9.0).tolist(),
    ]


@case
def keyed_jagged_parts(root: str) -> Any:
    kjt = jagged(root, weighted=True)
    return {
        "stride": kjt.stride(),
        "length_per_key": kjt.length_per_key(),
        "offset_per_key": kjt.offset_per_key(),
        "offsets": kjt.offsets().tolist(),
        "features": {
            k: [v.values().tolist(), v.lengths().tolist(), v.weights().tolist()]
            for k, v in kjt.to_dict().items()
        },
        "text": str(jagged(root)),
    }


@case
def keyed_jagged_split_and_permute(root: str) -> Any:
    kjt = jagged(root, weighted=True)
    parts = [*kjt.split([1, 1]), kjt.permute([1, 0]), kjt.permute([1, 0, 1])]
    return [
        [p.keys(), p.values().tolist(), p.lengths().tolist(), numbers(p.weights())] for p in parts
    ]


@case
def keyed_jagged_concat(root: str) -> Any:
    import torch

    made = of(root, "sparse.jagged_tensor").KeyedJaggedTensor
    more = made.from_lengths_sync(
        keys=["shop"], values=torch.tensor([3, 3]), lengths=torch.tensor([0, 1, 1])
    )
    both = made.concat([jagged(root), more])
    return [both.keys(), both.values().tolist(), both.lengths().tolist(), both.stride()]


@case
def keyed_tensor_regrouped(root: str) -> Any:
    keyed = of(root, "sparse.jagged_tensor").KeyedTensor
    a = keyed.from_tensor_list(["x", "y"], [filled(2, 3), filled(2, 2, 5)])
    b = keyed.from_tensor_list(["z"], [filled(2, 1, 9)])
    groups = keyed.regroup([a, b], [["z", "x"], ["y"]])
    return {
        "y": numbers(a["y"]),
        "lengths": a.length_per_key(),
        "groups": [numbers(g) for g in groups],
    }


@case
def jagged_tensor_built(root: str) -> Any:
    """From dense rows and lengths, from a list of rows, empty, empty like another."""
    import torch

    made = of(root, "sparse.jagged_tensor").JaggedTensor
    rows, lengths = filled(3, 4, 1), torch.tensor([2, 0, 4])
    lists = [torch.tensor([1.0]), torch.tensor([]), torch.tensor([7.0, 8.0])]
    like = made.empty_like(
        jagged_tensor(
            root, values=torch.tensor([1.0]), lengths=torch.tensor([1]), weights=rows[0, :1]
        )
    )
    return {
        "lengths": numbers(made.from_dense_lengths(rows, lengths, weights=-rows).weights()),
        "rows": jagged_parts(made.from_dense_lengths(rows, lengths)),
        "lists": jagged_parts(made.from_dense(lists, weights=lists)),
        "empty": [
            str(made.empty(values_dtype=torch.int64).values().dtype),
            made.empty().weights_or_none() is None,
        ],
        "weighted": made.empty(is_weighted=True).weights().tolist(),
        "like": [like.values().tolist(), like.lengths().tolist(), like.weights().tolist()],
    }


@case
def jagged_tensor_weights(root: str) -> Any:
    import torch

    values, lengths = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([2, 0, 1])
    jt = jagged_tensor(root, values=values, lengths=lengths, weights=torch.tensor([0.1, 0.2, 0.3]))
    plain = jagged_tensor(root, values=values, lengths=lengths)
    return {
        "dense": [numbers(x) for x in jt.to_dense_weights()],
        "padded": [
            numbers(jt.to_padded_dense_weights()),
            numbers(jt.to_padded_dense_weights(3, padding_value=1.0)),
        ],
        "none": [plain.to_dense_weights(), plain.to_padded_dense_weights()],
    }


@case
def jagged_tensor_of_rows(root: str) -> Any:
    """Values with two dimensions: a sequence of embeddings for each sample."""
    import torch

    jt = jagged_tensor(root, values=filled(3, 2), lengths=torch.tensor([2, 0, 1]))
    return [[numbers(x) for x in jt.to_dense()], numbers(jt.to_padded_dense(1)), str(jt)]


@case
def jagged_tensor_printed(root: str) -> Any:
    import torch

    values, offsets = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0, 2, 2, 3])
    return [
        str(jagged_tensor(root, values=values, offsets=offsets)),
        str(jagged_tensor(root, values=values, offsets=offsets, weights=values / 2)),
        str(jagged_tensor(root, values=values[:0], offsets=offsets[:1])),
    ]


@case
def jagged_tensor_sizes(root: str) -> Any:
    import torch

    values, lengths = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([2, 0, 1], dtype=torch.int32)
    made = jagged_tensor(root, values=values, lengths=lengths)
    return [
        made.size_in_bytes(),
        jagged_tensor(
            root, values=values, lengths=lengths, weights=values.double()
        ).size_in_bytes(),
        jagged_tensor(root, values=values, offsets=torch.tensor([0, 3])).size_in_bytes(),
        jagged(root, weighted=True).size_in_bytes(),
    ]


@case
def jagged_tensor_copied(root: str) -> Any:
    import torch

    into = jagged_tensor(root, values=torch.zeros(3), lengths=torch.tensor([3, 0]))
    source = jagged_tensor(root, values=torch.tensor([1.0, 2.0, 3.0]), lengths=torch.tensor([1, 2]))
    return [into.copy_(source) is into, into.values().tolist(), into.lengths().tolist()]


@case
def jagged_tensors_compared(root: str) -> Any:
    import torch

    equal = of(root, "sparse.jagged_tensor").jt_is_equal
    values, lengths = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([2, 0, 1])
    one = jagged_tensor(root, values=values, lengths=lengths)
    others = [
        jagged_tensor(root, values=values.clone(), offsets=torch.tensor([0, 2, 2, 3])),
        jagged_tensor(root, values=values + 1, lengths=lengths),
        jagged_tensor(root, values=values, lengths=torch.tensor([1, 1, 1])),
        jagged_tensor(root, values=values, lengths=lengths, weights=values),
        "not jagged",
    ]
    return [equal(one, other) for other in others]


@case
def keyed_jagged_lengths_and_offsets(root: str) -> Any:
    """The same batch from offsets; what it knows once synced and no longer knows unsynced."""
    import torch

    made = of(root, "sparse.jagged_tensor").KeyedJaggedTensor
    offsets = torch.tensor([0, 2, 2, 3, 4, 5, 7])
    kjt = made.from_offsets_sync(
        keys=["item", "user"], values=torch.tensor([7, 8, 7, 4, 5, 1, 1]), offsets=offsets
    )
    fresh = made(keys=["item", "user"], values=kjt.values(), offsets=offsets)
    synced = [fresh.sync().length_per_key_or_none(), fresh.offset_per_key_or_none()]
    after = [fresh.unsync().length_per_key_or_none(), fresh.offset_per_key_or_none()]
    return [parts_of(kjt), synced, after, fresh.lengths_or_none() is None, kjt.index_per_key()]


@case
def keyed_jagged_lookup(root: str) -> Any:
    kjt = jagged(root, weighted=True)
    without = jagged(root).to_dict(compute_offsets=False)
    return [
        jagged_parts(kjt["item"]),
        jagged_parts(kjt["user"]),
        without["user"].offsets_or_none() is None,
    ]


@case
def keyed_jagged_split_into_none(root: str) -> Any:
    """Segments without keys keep the number of samples."""
    return [parts_of(part) for part in jagged(root, weighted=True).split([0, 2, 0])]


@case
def keyed_jagged_flattened(root: str) -> Any:
    import torch

    made = of(root, "sparse.jagged_tensor").KeyedJaggedTensor
    kjt = made(
        keys=["item", "user"],
        values=torch.tensor([7, 8, 4]),
        lengths=torch.tensor([[2, 0], [1, 0]]),
    )
    return [kjt.flatten_lengths().lengths().tolist(), kjt.stride(), parts_of(kjt.flatten_lengths())]


@case
def keyed_jagged_empty(root: str) -> Any:
    import torch

    made = of(root, "sparse.jagged_tensor").KeyedJaggedTensor
    empty, like = made.empty(is_weighted=True), made.empty_like(jagged(root, weighted=True))
    variable_like = made.empty_like(variable(root))
    return [
        [
            empty.keys(),
            empty.values().tolist(),
            empty.weights().tolist(),
            empty.to_dict(),
            str(made([], torch.tensor([]))),
        ],
        [like.keys(), like.values().tolist(), str(like.values().dtype), like.stride()],
        [variable_like.variable_stride_per_key(), variable_like.stride_per_key_per_rank()],
    ]


@case
def keyed_jagged_copied(root: str) -> Any:
    import torch

    into, source = jagged(root, weighted=True), jagged(root, weighted=True)
    for tensor in (into.values(), into.lengths(), into.weights()):
        tensor.zero_()
    return [into.copy_(source) is into, parts_of(into), parts_of(source.to(torch.device("cpu")))]


@case
def keyed_jagged_from_dict(root: str) -> Any:
    """Equal numbers of samples give a plain batch, different ones a variable batch."""
    made = of(root, "sparse.jagged_tensor").KeyedJaggedTensor
    plain, many = (
        made.from_jt_dict(jagged(root, weighted=True).to_dict()),
        made.from_jt_dict(variable(root).to_dict()),
    )
    return [parts_of(plain), parts_of(many), many.stride_per_key_per_rank()]


@case
def keyed_jagged_dict_modules(root: str) -> Any:
    module = of(root, "sparse.jagged_tensor")
    split = module.ComputeKJTToJTDict()(variable(root))
    joined = module.ComputeJTDictToKJT()(jagged(root, weighted=True).to_dict())
    return [{key: jagged_parts(jt) for key, jt in split.items()}, parts_of(joined)]


@case
def keyed_jagged_compared(root: str) -> Any:
    import torch

    module = of(root, "sparse.jagged_tensor")
    made, equal = module.KeyedJaggedTensor, module.kjt_is_equal
    values, lengths, keys = torch.tensor([1, 2, 3]), torch.tensor([2, 0, 1, 0]), ["item", "user"]
    one = made(keys, values, lengths=lengths)
    others = [
        made(keys, values.clone(), offsets=torch.tensor([0, 2, 2, 3, 3])),
        made(keys[::-1], values, lengths=lengths),
        made(keys, values + 1, lengths=lengths),
        made(keys, values, lengths=torch.tensor([1, 1, 1, 0])),
        made(keys, values, lengths=lengths, weights=torch.ones(3)),
        made(["item"], values, lengths=torch.tensor([2, 1])),
        made.empty(),
        "not keyed",
    ]
    return [equal(one, other) for other in others] + [equal(variable(root), variable(root))]


@case
def variable_batch_parts(root: str) -> Any:
    kjt = variable(root)
    features = {key: jagged_parts(jt) for key, jt in kjt.to_dict().items()}
    lookups = [jagged_parts(kjt[key]) for key in kjt.keys()]
    ranks = [kjt.stride_per_key_per_rank(), kjt.lengths_offset_per_key()]
    return [parts_of(kjt), ranks, features, lookups, str(kjt), str(variable(root, weighted=False))]


@case
def variable_batch_split_and_permute(root: str) -> Any:
    kjt = variable(root)
    parts = [*kjt.split([1, 2]), *kjt.split([0, 3]), kjt.permute([2, 0, 1]), kjt.permute([2, 2, 0])]
    return [parts_of(part) for part in parts] + [kjt.permute([2, 0]).stride_per_key_per_rank()]


@case
def variable_batch_joined(root: str) -> Any:
    import torch

    made = of(root, "sparse.jagged_tensor").KeyedJaggedTensor
    more = made(
        keys=["city"],
        values=torch.tensor([3, 3]),
        weights=torch.tensor([0.5, 2.0]),
        lengths=torch.tensor([2]),
        stride_per_key_per_rank=[[1]],
    )
    return [
        parts_of(made.concat([variable(root), more])),
        variable(root).to(torch.device("cpu")).stride_per_key(),
    ]


@case
def variable_batch_of_two_ranks(root: str) -> Any:
    """A feature's samples come from two ranks; strides may also be a tensor."""
    import torch

    made = of(root, "sparse.jagged_tensor").KeyedJaggedTensor
    parts = {
        "keys": ["item", "user"],
        "values": torch.arange(8),
        "offsets": torch.tensor([0, 2, 2, 3, 4, 5, 8]),
    }
    found = []
    for strides in ([[1, 1], [1, 3]], torch.tensor([[1, 1], [1, 3]], dtype=torch.int32)):
        kjt = made(**parts, stride_per_key_per_rank=strides)
        found.append([parts_of(kjt), kjt.stride_per_key_per_rank(), str(kjt)])
    return found


@case
def inverse_indices_kept(root: str) -> Any:
    import torch

    kjt = shared(root, ["user", "item"])
    joined = type(kjt).concat([kjt, shared(root, ["shop", "city"])]).inverse_indices()
    moved = kjt.to(torch.device("cpu")).inverse_indices()
    return [
        kjt.stride(),
        *([keys, indices.tolist()] for keys, indices in (kjt.inverse_indices(), moved, joined)),
    ]


@case
def tensor_dict_converted(root: str) -> Any:
    """Nested tensors with offsets and with lengths, in the order asked for; a batch
    passes through.
    """
    import torch
    from tensordict import TensorDict

    convert, nested = (
        of(root, "sparse.tensor_dict").maybe_td_to_kjt,
        torch.nested.nested_tensor_from_jagged,
    )
    entries = {
        "user": nested(torch.tensor([2, 3]), lengths=torch.tensor([1, 1])),
        "item": nested(torch.tensor([7, 8]), offsets=torch.tensor([0, 2, 2])),
    }
    td, batch = TensorDict(entries, batch_size=[2]), jagged(root)
    return [parts_of(convert(td, ["item", "user"])), convert(td).keys(), convert(batch) is batch]


@case
def keyed_tensor_parts(root: str) -> Any:
    import torch

    made = of(root, "sparse.jagged_tensor").KeyedTensor
    columns = made.from_tensor_list(["x", "y"], [filled(2, 3), filled(2, 2, 5)])
    rows = made.from_tensor_list(["x", "y"], [filled(1, 2), filled(2, 2, 5)], cat_dim=0, key_dim=0)
    return {
        "columns": [columns.offset_per_key(), columns.key_dim(), columns.size_in_bytes()],
        "rows": [
            rows.key_dim(),
            numbers(rows["y"]),
            {key: numbers(part) for key, part in rows.to_dict().items()},
        ],
        "texts": [str(columns), str(rows), str(made([], [], torch.tensor([])))],
    }


@case
def keyed_tensor_regrouped_as_dict(root: str) -> Any:
    """A key in two groups, a key in none; gradients add up."""
    keyed = of(root, "sparse.jagged_tensor").KeyedTensor
    values = filled(2, 5).requires_grad_()
    a = keyed(["x", "y", "unused"], [2, 1, 2], values)
    b = keyed.from_tensor_list(["z"], [filled(2, 1, 9)])
    groups = keyed.regroup_as_dict([a, b], [["z", "x"], ["x", "y"]], ["left", "right"])
    (groups["left"].sum() + 2 * groups["right"].sum()).backward()
    return [{key: numbers(part) for key, part in groups.items()}, numbers(values.grad)]
