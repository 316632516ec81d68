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
        count = len(self.lengths)
        return torch.arange(count).repeat_interleave(self.lengths)


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


@dataclass(frozen=True)
class Table:
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
        state: The sum of each row's mean squared gradients [R], changed in place.
        ids: [U], different ones.
        gradient: Of each [U, D].
        rate: Of learning.
        eps: Added to the root of the state.
    """
    state[ids] += gradient.square().mean(dim=1)
    scale = state[ids].sqrt() + eps
    weight[ids] -= rate * gradient / scale[:, None]


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

    with ThreadPoolExecutor(size) as threads:
        results = list(threads.map(run, range(size)))
    if errors:
        raise errors[0]
    return results


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
    pairs = zip(group.swap(values), group.swap(lengths), strict=True)
    return [Bags(*pair) for pair in pairs]


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


@dataclass(frozen=True)
class TableWise:
    """One rank holds the table."""

    owner: int

    def region(self, table, rank, size):
        """Rows and columns that a rank holds."""
        rows = table.rows if rank == self.owner else 0
        return slice(0, rows), slice(0, table.columns)

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
        block = -(-table.rows // size)  # rounded up
        rows = slice(rank * block, (rank + 1) * block)
        return rows, slice(0, table.columns)

    def send_ids(self, group, table, bags):
        """Each id goes to the rank that holds its row."""
        block = -(-table.rows // group.size)
        return all_to_all_ids(group, split_by_row(bags, block, group.size))

    def send_rows_back(self, group, sums):
        """Each rank has summed the rows that it holds; add up these sums."""
        return reduce_scatter(group, sums)


def split_by_row(bags: Bags, block: int, blocks: int) -> list[Bags]:
    """Bags of the ids of each block of rows, counted from its first row."""
    split = []
    for index in range(blocks):
        inside = bags.values // block == index
        samples = bags.samples()[inside]
        lengths = samples.bincount(minlength=len(bags.lengths))
        split.append(Bags(bags.values[inside] - index * block, lengths))
    return split


@dataclass(frozen=True)
class ColumnWise:
    """Each rank holds some columns of all rows."""

    def region(self, table, rank, size):
        """Rows and columns that a rank holds."""
        width = -(-table.columns // size)
        columns = slice(rank * width, (rank + 1) * width)
        return slice(0, table.rows), columns

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
        return slice(0, table.rows), slice(0, table.columns)

    def send_ids(self, group, table, bags):
        """Nothing travels."""
        return [bags]

    def send_rows_back(self, group, sums):
        """Nothing travels."""
        return sums[0]


# 5. A collection of sharded tables


class Rows(NamedTuple):
    """A whole table, as a checkpoint has it."""

    weight: Tensor  # [R, D]
    state: Tensor  # [R, D]: the optimizer's number of a row, repeated


class ShardedTable:
    """What one rank holds of a table."""

    def __init__(self, group, table, plan, start, optimizer):
        self.group = group
        self.table = table
        self.way = plan[table.name]
        self.optimizer = optimizer
        region = self.way.region(table, group.rank, group.size)
        rows = start[table.name]
        self.weight = rows.weight[region].clone()
        self.state = rows.state[region].mean(dim=1)

    def __call__(self, bags: Bags) -> Tensor:
        """The sum of each bag [B, D], whichever ranks hold its rows."""
        received = self.way.send_ids(self.group, self.table, bags)
        sums = self.look_up(received)
        return self.way.send_rows_back(self.group, sums)

    def look_up(self, received: list[Bags]):
        """One lookup for all ranks, whose backward is an update; the sums for each."""
        joined = join(received)
        sums = pool(self.weight[joined.values], joined).requires_grad_()
        sums.register_hook(lambda gradient: self.update(joined, gradient))
        return sums.split([len(bags.lengths) for bags in received])

    def update(self, bags: Bags, gradient: Tensor) -> None:
        """Update each row once, by the sum of its gradients."""
        ids, totals = sum_by_id(bags.values, gradient[bags.samples()])
        if isinstance(self.way, Replicated):
            all_ids = torch.cat(all_gather(self.group, ids))
            all_totals = torch.cat(all_gather(self.group, totals))
            ids, totals = sum_by_id(all_ids, all_totals)
        mean = totals / self.group.size  # over the losses of all ranks
        self.optimizer(self.weight, self.state, ids, mean)

    def save(self) -> Rows:
        """The whole table, on every rank."""
        weights = all_gather(self.group, self.weight)
        states = all_gather(self.group, self.state)
        shape = self.table.rows, self.table.columns
        whole = Rows(torch.empty(shape), torch.empty(shape))
        for rank in range(self.group.size):
            region = self.way.region(self.table, rank, self.group.size)
            whole.weight[region] = weights[rank]
            whole.state[region] = states[rank][:, None]
        return whole


class Collection:
    """Tables, sharded by a plan: the name of each -> its way."""

    def __init__(self, group, tables, plan, start, optimizer):
        self.tables = []
        for table in tables:
            sharded = ShardedTable(group, table, plan, start, optimizer)
            self.tables.append(sharded)

    def __call__(self, batch: Batch) -> dict[str, Tensor]:
        """Feature -> its pooled rows [B, D], or the row of each id [N, D]."""
        outputs = {}
        for sharded in self.tables:
            table = sharded.table
            bags = [batch[key] for key in table.features]
            if table.pooling == "none":  # every id is a bag
                bags = [Bags(ids, torch.ones_like(ids)) for ids, _ in bags]
            joined = join(bags)
            rows = sharded(joined)
            if table.pooling == "mean":
                rows = rows / joined.lengths.clamp(min=1)[:, None]
            split = rows.split([len(lengths) for _, lengths in bags])
            outputs.update(zip(table.features, split, strict=True))
        return outputs

    def save(self) -> dict[str, Rows]:
        """A checkpoint, from which a collection starts under any plan."""
        return {sharded.table.name: sharded.save() for sharded in self.tables}


# 6. A planner


@dataclass
class Planner:
    """Plans for W ranks with so many bytes of memory, and B samples on each."""

    size: int
    memory: float
    samples: int

    def cost(self, table: Table, way) -> Tensor:
        """Bytes that each rank holds, and exchanges in a step [2, W]."""
        regions = [way.region(table, r, self.size) for r in range(self.size)]
        whole = torch.empty(table.rows, table.columns, device="meta")  # no data
        rows, columns = torch.tensor([whole[r].shape for r in regions]).T
        held = 4 * rows * (columns + 1)  # a row's state is one number more
        bags = self.samples * len(table.features)  # how many each rank has
        ids = bags * table.bag_length * rows / table.rows
        if isinstance(way, Replicated):  # gradients, and their ids
            sent = (4 * columns + 8) * ids.clamp(max=table.rows)
        else:  # ids; of each bag its length, its sum and the sum's gradient
            sent = 8 * ids + (8 + 2 * 4 * columns) * bags * (rows > 0)
        return torch.stack([held, sent * (self.size - 1)])

    def plan(self, tables: list[Table]) -> dict[str, Any]:
        """Largest table first, each in the way of fewest bytes that balances the ranks."""
        owners = [TableWise(rank) for rank in range(self.size)]
        ways = [*owners, RowWise(), ColumnWise(), Replicated()]
        costs = {(t, way): self.cost(t, way) for t in tables for way in ways}
        least = [min(costs[t, way][1].sum() for way in ways) for t in tables]
        fair = sum(least) / self.size  # bytes, if all ranks had the same
        load = torch.zeros(2, self.size)
        plan = {}
        for table in sorted(tables, key=lambda t: -t.rows * t.columns):
            choices = []
            for way in ways:
                held, sent = costs[table, way]
                after = load + costs[table, way]
                if after[0].max() <= self.memory:
                    slowest = max(sent.max(), fair)
                    balance = after[1].square().sum()
                    price = slowest, sent.sum(), held.sum(), balance
                    choices.append((price, way, after))
            if not choices:
                raise ValueError(f"{self}: no room for {table} on {load[0]}")
            best = min(choices, key=lambda choice: choice[0])
            _, plan[table.name], load = best
        return plan


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
