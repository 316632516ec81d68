"""How much one has to read to follow a step: `python tests/policy/step_files.py` writes it into
CONTRIBUTING.md.

One training step of a table-wise collection runs on two ranks under a tracer. The table lists the
files that run a line, of the layers of distributed training; all their lines of code count, whether
they ran or not. The totals below it count the files of all packages, for the step and for one call
of the planner.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from policy.test_layers import LAYERS, below, place
from policy.tree import PACKAGE, ROOT, SRC, SourceFile, Tree

from tutorec.spmd import Ranks

REPORT = ROOT / "CONTRIBUTING.md"
BEGIN, END = "<!-- files of a step: begin -->", "<!-- files of a step: end -->"
TOTALS_BEGIN, TOTALS_END = "<!-- totals: begin -->", "<!-- totals: end -->"
MOST_FILES = 13
MOST_OF_ALL = (23, 37_000)  # files and tokens of all packages that a step runs
READ = ("vocabulary", "moves", "sharding types", "sharded modules")


def traced(rank: int, world_size: int, folder: str) -> list[str]:
    """Paths below ``folder`` that run a line in the third step; by then the exchanges are built."""
    import torch
    import torch.distributed as dist

    from tutorec.distributed.core.env import ShardingEnv
    from tutorec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from tutorec.distributed.sharding_plan import construct_module_sharding_plan, table_wise
    from tutorec.modules.embedding_configs import EmbeddingBagConfig
    from tutorec.modules.embedding_modules import EmbeddingBagCollection
    from tutorec.sparse.keyed_jagged import KeyedJaggedTensor
    from tutorec.teach.trace import lines_run

    tables = [
        EmbeddingBagConfig(8, 4, name, feature_names=[f"f_{name}"]) for name in ("item", "user")
    ]
    ebc = EmbeddingBagCollection(tables)
    plan = construct_module_sharding_plan(
        ebc, {"item": table_wise(rank=1), "user": table_wise(rank=0)}
    )
    group = dist.group.WORLD
    assert group is not None, "a pool's ranks have a group"
    sharded = EmbeddingBagCollectionSharder().shard(
        ebc, plan, ShardingEnv.from_process_group(group)
    )

    def step() -> None:
        ids, lengths = torch.tensor([1, 2, 7, 3]), torch.tensor([2, 0, 1, 1])
        sharded(
            KeyedJaggedTensor(["f_item", "f_user"], ids, lengths=lengths)
        ).values().sum().backward()

    step()
    step()
    return list(lines_run(step, folder))


def planning_files(folder: str) -> list[str]:
    """Paths below ``folder`` that run a line in the second planning call; by then all modules are
    imported.
    """
    from tutorec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from tutorec.distributed.planner import EmbeddingShardingPlanner, Topology
    from tutorec.modules.embedding_configs import EmbeddingBagConfig
    from tutorec.modules.embedding_modules import EmbeddingBagCollection
    from tutorec.teach.trace import lines_run

    tables = [
        EmbeddingBagConfig(8, 4, name, feature_names=[f"f_{name}"]) for name in ("item", "user")
    ]
    ebc = EmbeddingBagCollection(tables)

    def plan() -> None:
        planner = EmbeddingShardingPlanner(Topology(world_size=2, compute_device="cpu"))
        planner.plan(ebc, [EmbeddingBagCollectionSharder()])

    plan()
    return list(lines_run(plan, folder))


def modules_of(paths: list[str], tree: Tree) -> list[SourceFile]:
    """The traced files, each once."""
    names = (
        f"{PACKAGE}." + path.removesuffix(".py").replace("/", ".") for path in dict.fromkeys(paths)
    )
    return [tree.modules[name.removesuffix(".__init__")] for name in names]


def totals(step: list[str], planning: list[str], tree: Tree) -> str:
    """Files and tokens of a step and of a planning call, all packages counted, between their
    markers.
    """
    lines = ["| all packages | files | tokens |", "|---|---|---|"]
    for title, paths in (("one training step", step), ("one planning call", planning)):
        files = modules_of(paths, tree)
        lines.append(f"| {title} | {len(files)} | {sum(file.tokens() for file in files):,} |")
    return "\n".join([TOTALS_BEGIN, "", *lines, "", TOTALS_END])


def replaced(text: str, begin: str, end: str, section: str) -> str:
    """The text with another section from ``begin`` to ``end``."""
    return text.split(begin, 1)[0] + section + text.split(end, 1)[1]


def report(paths: list[str], tree: Tree) -> list[tuple[str, str, int]]:
    """(layer, file, tokens) of the traced files that count, in the order of the layers."""
    rows = []
    for path in dict.fromkeys(paths):
        module = f"{PACKAGE}." + path.removesuffix(".py").replace("/", ".")
        found = place(below(module))
        if found is not None and LAYERS[found[0]][0] in READ:
            rows.append((LAYERS[found[0]][0], path, tree.modules[module].tokens()))
    return sorted(rows, key=lambda row: READ.index(row[0]))


def as_text(rows: list[tuple[str, str, int]]) -> str:
    """The table, between its markers."""
    lines = ["| layer | file | tokens |", "|---|---|---|"]
    lines += [f"| {layer} | `{path}` | {count:,} |" for layer, path, count in rows]
    lines.append(f"| | {len(rows)} files | {sum(count for _, _, count in rows):,} |")
    return "\n".join([BEGIN, "", *lines, "", END])


def too_many(rows: list[tuple[str, str, int]]) -> list[str]:
    """What is wrong with the number of files."""
    if len(rows) <= MOST_FILES:
        return []
    files = ", ".join(path for _, path, _ in rows)
    return [f"one table-wise step runs lines of {len(rows)} files, at most {MOST_FILES}: {files}"]


def too_much(paths: list[str], tree: Tree) -> list[str]:
    """A violation if a step runs lines of more files or tokens, all packages counted."""
    files = modules_of(paths, tree)
    size = len(files), sum(file.tokens() for file in files)
    if all(had <= most for had, most in zip(size, MOST_OF_ALL, strict=True)):
        return []
    return [f"one table-wise step reads {size} files and tokens, at most {MOST_OF_ALL}: {paths}"]


def stale(rows: list[tuple[str, str, int]], text: str) -> list[str]:
    """What is wrong with the table in a text."""
    if as_text(rows) in text:
        return []
    return [
        f"{REPORT.name} says something else: run `python tests/policy/step_files.py` and commit it"
    ]


def main() -> None:
    with Ranks(2) as ranks:
        paths = [
            path for of_rank in ranks.run(traced, folder=str(SRC / PACKAGE)) for path in of_rank
        ]
    if not paths:
        raise SystemExit(
            f"no file of {SRC / PACKAGE} ran: another tutorec is imported; set PYTHONPATH to {SRC}"
        )
    tree = Tree.of_repository()
    rows = as_text(report(paths, tree))
    sums = totals(paths, planning_files(str(SRC / PACKAGE)), tree)
    text = replaced(REPORT.read_text(encoding="utf-8"), BEGIN, END, rows)
    REPORT.write_text(replaced(text, TOTALS_BEGIN, TOTALS_END, sums), encoding="utf-8")
    print(rows, sums, sep="\n")


if __name__ == "__main__":
    main()
