"""TorchRec in 300 lines: sharded embedding tables, to be read from top to bottom in an hour.

It imports torch and the standard library. The notebook ``notebooks/nano.ipynb`` is this code, cell
by cell, with explanations and with something to run after each step. Shapes: B samples on a rank,
W ranks, F features, N ids, R rows and D columns of a table.

Example:
    >>> import torch
    >>> from functools import partial
    >>> half = partial(sgd, rate=0.5)
    >>> table = Table("product", rows=8, columns=2, features=("viewed",))
    >>> start = {"product": Rows(torch.ones(8, 2), torch.zeros(8, 2))}
    >>> def train(group):
    ...     tables = Collection(group, [table], {"product": RowWise()}, start, half)
    ...     batch = Batch(["viewed"], torch.tensor([7, 2]), torch.tensor([[2]]))
    ...     tables(batch)["viewed"].sum().backward()
    ...     return tables.save()["product"].weight[:, 0].tolist()
    >>> run_ranks(2, train)[0]
    [1.0, 1.0, 0.5, 1.0, 1.0, 1.0, 1.0, 0.5]
"""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

# 1. Jagged batches


class Bags(NamedTuple):
    """Ids of one feature: the bag of sample b is the next ``lengths[b]`` ids."""

    values: Tensor  # [N]
    lengths: Tensor  # [B]

    def samples(self) -> Tensor:
        """The sample of each id [N]."""
        return torch.arange(len(self.lengths)).repeat_interleave(self.lengths)


@dataclass
class Batch:
    """The bags of F features in two tensors."""

    keys: list[str]
    values: Tensor  # [N], feature by feature
    lengths: Tensor  # [F, B]

    def __getitem__(self, key: str) -> Bags:
        """The bags of one feature."""
        index = self.keys.index(key)
        counts = self.lengths.sum(dim=1).tolist()
        return Bags(self.values.split(counts)[index], self.lengths[index])


def join(bags: list[Bags]) -> Bags:
    """The bags of several features, or of several ranks, in one."""
    values, lengths = zip(*bags, strict=True)
    return Bags(torch.cat(values), torch.cat(lengths))


# 2. Tables, lookups, optimizers


class Table(NamedTuple):
    """An embedding table, and the features that read it."""

    name: str
    rows: int
    columns: int
    features: tuple[str, ...]
    pooling: str = "sum"  # or "mean", or "none": a row for each id
    bag_length: float = 1.0  # on average, for the planner


def pool(rows: Tensor, bags: Bags) -> Tensor:
    """Rows of ids [N, D] -> the sum of each bag [B, D]: zeros if it is empty."""
    sums = rows.new_zeros(len(bags.lengths), rows.shape[1])
    return sums.index_add(0, bags.samples(), rows)


def sum_by_id(ids: Tensor, gradients: Tensor) -> tuple[Tensor, Tensor]:
    """Ids [N] and a gradient for each [N, D] -> different ids [U], sums [U, D]."""
    different, place = ids.unique(return_inverse=True)
    sums = gradients.new_zeros(len(different), gradients.shape[1])
    return different, sums.index_add(0, place, gradients)


def sgd(weight, state, ids, gradient, rate):
    """Update some rows.

    Args:
        weight: [R, D], changed in place.
        state: Not used.
        ids: [U], different ones.
        gradient: Of each [U, D].
        rate: Of learning.
    """
    weight[ids] -= rate * gradient


def rowwise_adagrad(weight, state, ids, gradient, rate, eps=1e-8):
    """Update some rows: the larger a row's earlier gradients, the smaller its steps.

    Args:
        weight: [R, D], changed in place.
        state: The sum of each row's mean squared gradients [R, 1], changed in place.
        ids: [U], different ones.
        gradient: Of each [U, D].
        rate: Of learning.
        eps: Added to the root of the state.
    """
    state[ids] += gradient.square().mean(dim=1, keepdim=True)
    weight[ids] -= rate * gradient / (state[ids].sqrt() + eps)


# 3. Ranks and exchanges


@dataclass
class Group:
    """W ranks, seen from one of them: threads that leave tensors for each other."""

    rank: int
    size: int  # W
    boxes: list[Any]
    barrier: threading.Barrier
    sent: int = 0  # bytes, to other ranks

    def swap(self, tensors):
        """Give tensor r to rank r, and get a tensor from each rank."""
        sizes = [tensor.nbytes for tensor in tensors]
        self.sent += sum(sizes) - sizes[self.rank]
        self.boxes[self.rank] = tensors
        self.barrier.wait()
        received = [box[self.rank].clone() for box in self.boxes]
        self.barrier.wait()  # until every rank has read
        return received


def run_ranks(size: int, function) -> list[Any]:
    """Call ``function(group)`` on each of W ranks; the results in rank order."""
    boxes: list[Any] = [None] * size
    barrier = threading.Barrier(size, timeout=60)  # seconds
    errors = []

    def run(rank):
        try:
            return function(Group(rank, size, boxes, barrier))
        except BaseException as error:
            errors.append(error)
            barrier.abort()  # else the other ranks would wait forever
            raise errors[0] from None

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(run, range(size)))


class Exchange(torch.autograd.Function):
    """A swap of rows, whose backward swaps their gradients."""

    @staticmethod
    def forward(ctx, group, *tensors):
        """Tensor r goes to rank r."""
        ctx.group = group
        return tuple(group.swap(tensors))

    @staticmethod
    def backward(ctx, *gradients):
        """The gradient of what rank r has sent goes to rank r."""
        return None, *ctx.group.swap(gradients)


def all_to_all_ids(group: Group, bags: list[Bags]) -> list[Bags]:
    """Give bags r to rank r; get the bags of each rank."""
    values, lengths = zip(*bags, strict=True)
    return list(map(Bags, group.swap(values), group.swap(lengths)))


def all_to_all_rows(group: Group, rows) -> tuple[Tensor, ...]:
    """Give rows r to rank r; get the rows of each rank."""
    return Exchange.apply(group, *rows)  # type: ignore[return-value]


def reduce_scatter(group: Group, rows) -> Tensor:
    """Give rows r to rank r; get the sum of what all ranks gave."""
    return torch.stack(all_to_all_rows(group, rows)).sum(dim=0)


def all_gather(group: Group, tensor: Tensor) -> tuple[Tensor, ...]:
    """Give a tensor to all ranks; get the tensor of each."""
    return all_to_all_rows(group, [tensor] * group.size)


# 4. Four ways to shard a table


def block(count: int, rank: int, size: int) -> slice:
    """Block ``rank`` of so many rows or columns, cut into W blocks."""
    length = -(-count // size)  # rounded up
    return slice(rank * length, (rank + 1) * length)


@dataclass(frozen=True)
class TableWise:
    """One rank holds the table."""

    owner: int

    def region(self, table, rank, size):
        """Rows and columns that a rank holds."""
        rows = table.rows if rank == self.owner else 0
        return slice(rows), slice(table.columns)

    def send_ids(self, group, table, bags):
        """All bags go to the owner."""
        nothing = Bags(bags.values[:0], bags.lengths[:0])
        parcels = [nothing] * group.size
        parcels[self.owner] = bags
        return all_to_all_ids(group, parcels)

    def send_rows_back(self, group, sums):
        """The sums come from the owner."""
        return all_to_all_rows(group, sums)[self.owner]


@dataclass(frozen=True)
class RowWise:
    """Each rank holds a block of rows."""

    def region(self, table, rank, size):
        """Rows and columns that a rank holds."""
        return block(table.rows, rank, size), slice(table.columns)

    def send_ids(self, group, table, bags):
        """Each id goes to the rank that holds its row."""
        return all_to_all_ids(group, split_by_row(bags, table.rows, group.size))

    def send_rows_back(self, group, sums):
        """Each rank has summed the rows that it holds; add up these sums."""
        return reduce_scatter(group, sums)


def split_by_row(bags: Bags, rows: int, blocks: int) -> list[Bags]:
    """Bags of the ids of each block of rows, counted from its first row."""
    split = []
    for index in range(blocks):
        part = block(rows, index, blocks)
        inside = (part.start <= bags.values) & (bags.values < part.stop)
        lengths = bags.samples()[inside].bincount(minlength=len(bags.lengths))
        split.append(Bags(bags.values[inside] - part.start, lengths))
    return split


@dataclass(frozen=True)
class ColumnWise:
    """Each rank holds some columns of all rows."""

    def region(self, table, rank, size):
        """Rows and columns that a rank holds."""
        return slice(table.rows), block(table.columns, rank, size)

    def send_ids(self, group, table, bags):
        """All bags go to all ranks."""
        return all_to_all_ids(group, [bags] * group.size)

    def send_rows_back(self, group, sums):
        """The columns of all ranks stand side by side."""
        return torch.cat(all_to_all_rows(group, sums), dim=1)


@dataclass(frozen=True)
class Replicated:
    """Each rank holds the whole table."""

    def region(self, table, rank, size):
        """Rows and columns that a rank holds."""
        return slice(table.rows), slice(table.columns)

    def send_ids(self, group, table, bags):
        """Nothing travels."""
        return [bags]

    def send_rows_back(self, group, sums):
        """Nothing travels."""
        return sums[0]


# 5. A planner


def cost(table: Table, way, size: int, samples: int) -> Tensor:
    """Bytes that each rank holds, and exchanges in a step [2, W].

    Args:
        table: The table.
        way: How it is sharded.
        size: W.
        samples: B.
    """
    whole = torch.empty(table.rows, table.columns, device="meta")  # no data
    parts = [whole[way.region(table, rank, size)] for rank in range(size)]
    rows, columns = torch.tensor([part.shape for part in parts]).T
    held = 4 * rows * (columns + 1)  # a row's state is one number more
    bags = samples * len(table.features)  # how many each rank has
    ids = bags * table.bag_length * rows / table.rows
    if isinstance(way, Replicated):  # gradients, and their ids
        sent = (4 * columns + 8) * ids.clamp(max=table.rows)
    else:  # ids; of each bag its length, its sum and the sum's gradient
        sent = 8 * ids + (8 + 2 * 4 * columns) * bags * (rows > 0)
    return torch.stack([held, sent * (size - 1)])


def make_plan(tables, size: int, memory: float, samples: int) -> dict[str, Any]:
    """Largest table first, each in the way of fewest bytes that balances the ranks.

    Args:
        tables: The tables.
        size: W.
        memory: Bytes that a rank has room for.
        samples: B.

    Raises:
        ValueError: No rank has room for a table.
    """
    owners = [TableWise(rank) for rank in range(size)]
    ways = [*owners, RowWise(), ColumnWise(), Replicated()]
    whole = [cost(table, owners[0], size, samples)[1].sum() for table in tables]
    fair = sum(whole) / size  # bytes, if all ranks had the same
    load = torch.zeros(2, size)
    plan = {}
    for table in sorted(tables, key=lambda t: -t.rows * t.columns):
        costs = {way: cost(table, way, size, samples) for way in ways}
        prices = {}
        for way, (held, sent) in costs.items():
            if (load[0] + held).max() <= memory:
                slowest = max(sent.max(), fair)
                balance = (load[1] + sent).square().sum()
                prices[way] = slowest, sent.sum(), held.sum(), balance
        if not prices:
            raise ValueError(f"no room for {table}: {load[0]} of {memory}")
        plan[table.name] = min(prices, key=prices.__getitem__)
        load += costs[plan[table.name]]
    return plan


# 6. A collection of sharded tables


class Rows(NamedTuple):
    """A whole table, as a checkpoint has it."""

    weight: Tensor  # [R, D]
    state: Tensor  # [R, D]: the optimizer's number of a row, repeated


class Shard:
    """What one rank holds of a table."""

    def __init__(self, group, table, plan, start, optimizer):
        self.group = group
        self.table = table
        self.way = plan[table.name]
        self.optimizer = optimizer
        region = self.way.region(table, group.rank, group.size)
        rows = start[table.name]
        self.weight = rows.weight[region].clone()
        self.state = rows.state[region].mean(dim=1, keepdim=True)

    def __call__(self, bags: Bags) -> Tensor:
        """The sum of each bag [B, D], whichever ranks hold its rows."""
        received = self.way.send_ids(self.group, self.table, bags)
        joined = join(received)  # one lookup for all ranks
        sums = pool(self.weight[joined.values], joined).requires_grad_()
        sums.register_hook(lambda gradient: self.update(joined, gradient))
        of_ranks = sums.split([len(bags.lengths) for bags in received])
        return self.way.send_rows_back(self.group, of_ranks)

    def update(self, bags: Bags, gradient: Tensor) -> None:
        """Update each row once, by the sum of its gradients."""
        ids, totals = sum_by_id(bags.values, gradient[bags.samples()])
        if isinstance(self.way, Replicated):
            all_ids = torch.cat(all_gather(self.group, ids))
            all_totals = torch.cat(all_gather(self.group, totals))
            ids, totals = sum_by_id(all_ids, all_totals)
        self.optimizer(self.weight, self.state, ids, totals / self.group.size)

    def gather(self, part: Tensor) -> Tensor:
        """The parts of all ranks, each in its region [R, D]."""
        whole = torch.empty(self.table.rows, self.table.columns)
        for rank, of_rank in enumerate(all_gather(self.group, part)):
            whole[self.way.region(self.table, rank, self.group.size)] = of_rank
        return whole

    def save(self) -> Rows:
        """The whole table, on every rank."""
        return Rows(self.gather(self.weight), self.gather(self.state))


class Collection:
    """Tables, sharded by a plan: the name of each -> its way."""

    def __init__(self, group, tables, plan, start, optimizer):
        self.shards = [Shard(group, t, plan, start, optimizer) for t in tables]

    def __call__(self, batch: Batch) -> dict[str, Tensor]:
        """Feature -> its pooled rows [B, D], or the row of each id [N, D]."""
        outputs = {}
        for shard in self.shards:
            table = shard.table
            bags = [batch[key] for key in table.features]
            if table.pooling == "none":  # every id is a bag
                bags = [Bags(ids, torch.ones_like(ids)) for ids, _ in bags]
            joined = join(bags)
            rows = shard(joined)
            if table.pooling == "mean":
                rows = rows / joined.lengths.clamp(min=1)[:, None]
            split = rows.split([len(lengths) for _, lengths in bags])
            outputs.update(zip(table.features, split, strict=True))
        return outputs

    def save(self) -> dict[str, Rows]:
        """A checkpoint, from which a collection starts under any plan."""
        return {shard.table.name: shard.save() for shard in self.shards}


# 7. Rows of 8 bits


class Int8Table:
    """Of each row D codes of 8 bits, a scale and a bias."""

    def __init__(self, weight: Tensor):
        self.bias, largest = weight.aminmax(dim=1, keepdim=True)
        self.scale = (largest - self.bias) / 255
        codes = (weight - self.bias) / self.scale.clamp(min=1e-10)
        self.codes = codes.round().to(torch.uint8)

    def __call__(self, bags: Bags) -> Tensor:
        """The sum of each bag [B, D]."""
        ids = bags.values
        rows = self.codes[ids] * self.scale[ids] + self.bias[ids]
        return pool(rows, bags)
