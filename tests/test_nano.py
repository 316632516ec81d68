"""TorchRec in 300 lines: its size, what it imports, its notebook, and that all ways train alike."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F
from torch.testing import assert_close

from tutorec import nano
from tutorec._kernels.backend import backend
from tutorec.nano import (
    Bags,
    Batch,
    Collection,
    ColumnWise,
    Group,
    Int8Table,
    Replicated,
    Rows,
    RowWise,
    Table,
    TableWise,
    run_ranks,
)

ROOT = Path(__file__).parents[1]
MODULE = Path(nano.__file__)
NOTEBOOK = json.loads((ROOT / "notebooks/nano.ipynb").read_text(encoding="utf-8"))["cells"]
CELLS = [(cell["id"], "".join(cell["source"])) for cell in NOTEBOOK if cell["cell_type"] == "code"]


# ---- the module and its notebook


def without_docstrings(text: str) -> str:
    """The code alone, without headings of sections and blank lines."""
    lines = text.splitlines()
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, documented) and ast.get_docstring(node) is not None:
            docstring = node.body[0]
            assert docstring.end_lineno is not None
            lines[docstring.lineno - 1 : docstring.end_lineno] = [""] * (
                docstring.end_lineno - docstring.lineno + 1
            )
    return "\n".join(line for line in lines if line.strip() and not re.match(r"# \d\. ", line))


def test_the_notebook_has_the_code_of_the_module():
    of_notebook = "\n\n".join(code for name, code in CELLS if name.startswith("nano-"))
    of_module = without_docstrings(MODULE.read_text(encoding="utf-8"))
    assert without_docstrings(of_notebook) == of_module, (
        "notebooks/nano.ipynb and src/tutorec/nano.py differ: change both, cells nano-*"
    )


def test_the_notebook_shows_its_code_and_is_read_in_an_hour():
    folded = {cell["id"] for cell in NOTEBOOK if cell["metadata"].get("tags")}
    assert folded == {"setup", "solution"}
    prose = [cell["source"] for cell in NOTEBOOK if cell["cell_type"] == "markdown"]
    assert sum(len("".join(source).split()) for source in prose) <= 2500


def test_it_is_short_and_needs_torch_alone():
    text = MODULE.read_text(encoding="utf-8")
    code = [line for line in without_docstrings(text).splitlines() if line.strip()[0] != "#"]
    assert len(code) <= 300
    imports = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Import)]
    froms = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom)]
    names = {alias.name for node in imports for alias in node.names}
    names |= {str(node.module) for node in froms}
    packages = {name.partition(".")[0] for name in names}
    assert packages - {"torch"} <= sys.stdlib_module_names


def test_the_notebook_runs_where_there_is_torch_alone(tmp_path: Path):
    cells = [code for name, code in CELLS if name != "setup"]
    blocked = "import sys\nsys.modules['tutorec'] = sys.modules['fbgemm_gpu'] = None\n"
    script = tmp_path / "script.py"
    script.write_text("\n\n".join([blocked, "installed = False", *cells]), encoding="utf-8")
    command = [sys.executable, "-W", "error", str(script)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert "loss in step 45:" in ran.stdout


@pytest.mark.slow
def test_it_is_less_than_a_hundredth_of_the_library():
    def lines(path: Path) -> int:
        code = without_docstrings(path.read_text(encoding="utf-8"))
        return sum(line.strip()[0] != "#" for line in code.splitlines())

    library = MODULE.parent.rglob("*.py")
    around = {"teach", "examples"}
    paths = [path for path in library if path.relative_to(MODULE.parent).parts[0] not in around]
    assert 100 * lines(MODULE) < sum(map(lines, paths))


# ---- every way trains what one rank trains

WAYS: dict[str, Callable[[int], Any]] = {
    "table-wise": lambda size: TableWise(size - 1),
    "row-wise": lambda size: RowWise(),
    "column-wise": lambda size: ColumnWise(),
    "replicated": lambda size: Replicated(),
}
RULES = {
    "sgd": partial(nano.sgd, rate=0.5),
    "row-wise adagrad": partial(nano.rowwise_adagrad, rate=0.5),
}


def start_of(tables: Sequence[Table], seed: int = 0) -> dict[str, Rows]:
    draw = torch.Generator().manual_seed(seed)
    shapes = {table.name: (table.rows, table.columns) for table in tables}
    return {
        name: Rows(torch.randn(shape, generator=draw), torch.zeros(shape))
        for name, shape in shapes.items()
    }


def batch_of(tables: Sequence[Table], samples: int, seed: int) -> Batch:
    """Bags of 0 to 3 ids."""
    draw = torch.Generator().manual_seed(seed)
    rows = {key: table.rows for table in tables for key in table.features}
    lengths = torch.randint(0, 4, (len(rows), samples), generator=draw)
    counts = lengths.sum(dim=1).tolist()
    values = [
        torch.randint(row, (count,), generator=draw)
        for row, count in zip(rows.values(), counts, strict=True)
    ]
    return Batch([*rows], torch.cat(values), lengths)


def weigh(outputs: dict[str, Tensor], seed: int) -> Tensor:
    """A loss whose gradient differs everywhere."""
    draw = torch.Generator().manual_seed(seed)
    terms = [(out * torch.rand(out.shape, generator=draw)).sum() for out in outputs.values()]
    return torch.stack(terms).sum()


def unsharded(
    tables: Sequence[Table], start: dict[str, Rows], batches: Sequence[Batch], slices: int
) -> dict[str, Tensor]:
    """One step of row-wise Adagrad in plain torch; one number of state for a row of a slice."""
    weights = {name: rows.weight.clone().requires_grad_() for name, rows in start.items()}
    total = torch.zeros(())
    for rank, batch in enumerate(batches):
        outputs = {}
        for table in tables:
            for key in table.features:
                values, lengths = batch[key]
                if table.pooling == "none":
                    outputs[key] = F.embedding(values, weights[table.name])
                    continue
                offsets = F.pad(lengths.cumsum(0), (1, 0))
                outputs[key] = F.embedding_bag(
                    values,
                    weights[table.name],
                    offsets,
                    mode=table.pooling,
                    include_last_offset=True,
                )
        total = total + weigh(outputs, rank)
    (total / len(batches)).backward()
    trained = {}
    for name, weight in weights.items():
        assert weight.grad is not None
        parts = weight.grad.chunk(slices, dim=1)
        moves = [part / (part.square().mean(1, True).sqrt() + 1e-8) for part in parts]
        trained[name] = weight.detach() - 0.5 * torch.cat(moves, dim=1)
    return trained


@given(
    way=st.sampled_from(sorted(WAYS)),
    size=st.sampled_from([1, 2, 4]),
    pooling=st.sampled_from(["sum", "mean", "none"]),
    rows=st.integers(1, 9),
    samples=st.lists(st.integers(0, 5), min_size=4, max_size=4),
    seed=st.integers(0, 99),
)
def test_a_step_is_that_of_plain_torch(
    way: str, size: int, pooling: str, rows: int, samples: list[int], seed: int
) -> None:
    tables = [
        Table("a", rows, 8, ("a0", "a1"), pooling),
        Table("b", 5, 4, ("b",), pooling),
    ]
    start = start_of(tables, seed)
    batches = [batch_of(tables, samples[rank], seed + rank) for rank in range(size)]
    plan = {table.name: WAYS[way](size) for table in tables}

    def step(group: Group) -> dict[str, Rows]:
        collection = Collection(group, tables, plan, start, RULES["row-wise adagrad"])
        weigh(collection(batches[group.rank]), group.rank).backward()
        return collection.save()

    slices = size if way == "column-wise" else 1
    wanted = unsharded(tables, start, batches, slices)
    for saved in run_ranks(size, step):
        for name, rows_of_table in saved.items():
            assert_close(rows_of_table.weight, wanted[name], rtol=1e-5, atol=1e-5)


TABLES = (
    Table("a", 7, 8, ("a0", "a1")),
    Table("b", 3, 4, ("b",), "mean"),
    Table("c", 9, 4, ("c",), "none"),
)


def train(
    group: Group, plan: dict[str, Any], rule: Any, start: dict[str, Rows], steps: range
) -> dict[str, Rows]:
    collection = Collection(group, TABLES, plan, start, rule)
    for step in steps:
        batch = batch_of(TABLES, 2 + group.rank, 10 * step + group.rank)
        weigh(collection(batch), step).backward()
    return collection.save()


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("way", ["row-wise", "replicated", "table-wise"])
def test_a_checkpoint_goes_on_under_another_plan(way: str, rule: str):
    start = start_of(TABLES)
    plan = {table.name: WAYS[way](2) for table in TABLES}
    other = {table.name: TableWise(0) for table in TABLES}
    whole = run_ranks(2, lambda g: train(g, plan, RULES[rule], start, range(4)))[0]
    saved = run_ranks(2, lambda g: train(g, plan, RULES[rule], start, range(2)))[0]
    resumed = run_ranks(2, lambda g: train(g, other, RULES[rule], saved, range(2, 4)))[1]
    for name, rows in whole.items():
        assert_close(resumed[name].weight, rows.weight, rtol=1e-5, atol=1e-6)
        assert_close(resumed[name].state, rows.state, rtol=1e-5, atol=1e-6)


def test_state_of_column_shards_becomes_that_of_whole_rows():
    plan = {table.name: ColumnWise() for table in TABLES}
    saved = run_ranks(
        2, lambda g: train(g, plan, RULES["row-wise adagrad"], start_of(TABLES), range(1))
    )[0]
    one_rank = {table.name: TableWise(0) for table in TABLES}

    def states(group: Group) -> list[Tensor]:
        shards = Collection(group, TABLES, one_rank, saved, None).shards
        return [shard.state for shard in shards]

    [found] = run_ranks(1, states)
    for state, rows in zip(found, saved.values(), strict=True):
        assert_close(state, rows.state.mean(dim=1, keepdim=True))


def test_a_rank_that_fails_ends_all_with_its_error():
    def fail(group: Group) -> None:
        if group.rank == 1:
            raise ValueError("no batch on rank 1")
        group.swap([torch.zeros(1)] * group.size)

    with pytest.raises(ValueError, match="no batch on rank 1"):
        run_ranks(3, fail)


# ---- the planner


def test_the_bytes_of_a_plan_are_those_that_travel():
    table = Table("a", 40, 8, ("a0", "a1"), bag_length=2)
    values = torch.arange(40).repeat(2)  # each row of the table as often as every other
    batch = Batch(["a0", "a1"], values, torch.full((2, 20), 2))
    start = start_of([table])
    for way in (TableWise(1), RowWise(), ColumnWise()):

        def step(group: Group, way: Any = way) -> int:
            collection = Collection(group, [table], {"a": way}, start, RULES["sgd"])
            rows = collection(batch)
            torch.cat([*rows.values()]).sum().backward()
            return group.sent

        _, exchanged = nano.cost(table, way, size=4, samples=20)
        assert sum(run_ranks(4, step)) == exchanged.sum(), way


def test_a_plan_copies_cuts_and_places():
    tables = [
        Table("large", 1_000_000, 64, ("large",), bag_length=10),
        Table("x", 50_000, 64, ("x",)),
        Table("y", 50_000, 64, ("y",)),
        Table("tiny", 10, 64, ("tiny",)),
    ]
    plan = nano.make_plan(tables, size=2, memory=160e6, samples=1024)
    assert plan["large"] == ColumnWise()  # no rank has room for its 260 MB
    assert {plan["x"], plan["y"]} == {TableWise(0), TableWise(1)}
    assert plan["tiny"] == Replicated()


@pytest.mark.parametrize(("bag_length", "way"), [(100, RowWise()), (2, ColumnWise())])
def test_a_table_that_would_keep_one_rank_busy_is_cut(bag_length: float, way: Any):
    table = Table("busy", 1_000_000, 8, ("busy",), bag_length=bag_length)
    plan = nano.make_plan([table], size=2, memory=1e9, samples=1024)
    assert plan == {"busy": way}


def test_a_plan_never_takes_more_memory_than_there_is():
    tables = [Table(f"t{index}", 1000 * (index + 1), 16, (f"f{index}",)) for index in range(8)]
    plan = nano.make_plan(tables, size=2, memory=1.25e6, samples=64)
    held = [nano.cost(table, plan[table.name], size=2, samples=64)[0] for table in tables]
    assert torch.stack(held).sum(dim=0).max() <= 1.25e6
    with pytest.raises(ValueError, match=r"no.*Table\(name='t\d'.*1000000\.0"):
        nano.make_plan(tables, size=2, memory=1e6, samples=64)


# ---- rows of 8 bits


@pytest.mark.skipif(backend().name != "fbgemm", reason="compares with fbgemm's codes")
def test_codes_are_those_of_fbgemm():
    weight = start_of([Table("a", 30, 16, ("a",))])["a"].weight
    table = Int8Table(weight)
    packed = torch.ops.fbgemm.FloatToFused8BitRowwiseQuantized(weight)
    assert (table.codes.int() - packed[:, :16].int()).abs().max() <= 1  # where a half is rounded
    assert_close(torch.cat([table.scale, table.bias], dim=1), packed[:, 16:].view(torch.float32))


def test_a_lookup_adds_up_what_codes_stand_for():
    weight = start_of([Table("a", 30, 16, ("a",))])["a"].weight
    table = Int8Table(weight)
    bags = Bags(torch.tensor([3, 3, 29]), torch.tensor([2, 0, 1]))
    exact = torch.stack([2 * weight[3], torch.zeros(16), weight[29]])
    halves = torch.stack([2 * table.scale[3], torch.zeros(1), table.scale[29]]) / 2
    assert ((table(bags) - exact).abs() <= 1.01 * halves).all()


def test_rows_of_one_number_are_exact():
    table = Int8Table(torch.full((3, 4), 0.7))
    assert_close(table(Bags(torch.tensor([1]), torch.tensor([1]))), torch.full((1, 4), 0.7))
