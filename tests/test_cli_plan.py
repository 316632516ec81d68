"""``tutorec plan``: what it prints and writes, and how it ends when a word or a file is wrong."""

from __future__ import annotations

import argparse
import io
import itertools
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tutorec import cli, table_files
from tutorec.distributed.plan.plan import ShardingPlan
from tutorec.table_files import load_tables, tables_of

TABLES = """
batch_size: 4
tables:
  - {name: item, num_embeddings: 1000, embedding_dim: 64, min_partition: 32}
  - {name: user, num_embeddings: 50, embedding_dim: 16, sharding_types: [row_wise]}
"""


@pytest.fixture
def tables(tmp_path: Path) -> str:
    path = tmp_path / "tables.yaml"
    path.write_text(TABLES, encoding="utf-8")
    return str(path)


def plan_parser() -> argparse.ArgumentParser:
    actions = cli._parser()._actions
    commands = next(action for action in actions if isinstance(action, argparse._SubParsersAction))
    return commands.choices["plan"]


def test_plan_prints_its_reasons(tables: str, capsys: pytest.CaptureFixture[str]):
    assert cli.main(["plan", tables, "--topology", "2xlaptop"]) == 0
    told = capsys.readouterr()
    assert "2 tables on 2 cpu ranks" in told.out
    assert "4 samples" in told.out
    assert "row_wise" in told.out
    assert told.err == ""


def test_plan_explains_a_table(tables: str, capsys: pytest.CaptureFixture[str]):
    assert cli.main(["plan", tables, "--topology", "2xlaptop", "--explain", "user"]) == 0
    told = capsys.readouterr().out
    assert "Table 'user': 50 rows of 16 columns" in told
    assert "its constraints allow only row_wise" in told.replace("\n  ", " ")


def test_saved_plan_is_for_the_tables_of_the_file(tables: str, tmp_path: Path):
    out, figure = tmp_path / "plan.json", tmp_path / "plan.svg"
    words = [
        "plan",
        tables,
        "--topology",
        "2xH100x2",
        "--batch-size",
        "8",
        "--out",
        str(out),
        "--plot",
        str(figure),
    ]
    assert cli.main(words) == 0
    plan = ShardingPlan.load(out)
    plan.check_fingerprint(load_tables(tables).model)
    assert plan.plan[""]["user"].ranks == [0, 1, 2, 3]
    assert "<svg" in figure.read_text(encoding="utf-8")


def test_optimal_plan_tells_its_gap(tables: str, capsys: pytest.CaptureFixture[str]):
    assert (
        cli.main(["plan", tables, "--topology", "2xlaptop", "--optimal", "--time-limit", "20"]) == 0
    )
    assert "mixed-integer program" in capsys.readouterr().out.replace("\n        ", " ")


@pytest.mark.slow
def test_command_runs_as_a_module(tables: str):
    command = [sys.executable, "-m", "tutorec", "plan", tables, "--topology", "2xlaptop"]
    environment = {**os.environ, "PYTHONWARNINGS": "error"}
    ran = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert "2 tables on 2 cpu ranks" in ran.stdout


def test_warnings_are_lines_without_a_place_in_the_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    path = tmp_path / "tables.yaml"
    path.write_text(
        "tables: [{name: item, num_embeddings: 8, embedding_dim: 4, colocate: alone}]",
        encoding="utf-8",
    )
    assert cli.main(["plan", str(path), "--topology", "2xlaptop"]) == 0
    told = (
        "tutorec plan: constraints of table 'item': colocate='alone' has no effect: no other "
        "table has that value\n"
    )
    assert capsys.readouterr().err == told


def test_what_does_not_fit_ends_with_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "tables.yaml"
    path.write_text(
        "tables: [{name: item, num_embeddings: 1e12, embedding_dim: 64}]", encoding="utf-8"
    )
    assert cli.main(["plan", str(path), "--topology", "2xlaptop"]) == 1
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith("tutorec plan: ")
    assert "'item'" in told.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--topology", "8xB999"], "there is no preset '8xB999'"),
        (["--topology", "laptop", "--batch-size", "0"], "batch_size=0 must"),
        (
            ["--topology", "laptop", "--out", "absent/plan.json"],
            "absent/plan.json: there is no folder",
        ),
        (
            ["--topology", "laptop", "--plot", "plan.txt"],
            "--plot plan.txt: write a name that ends in .svg",
        ),
        (["--topology", "laptop", "--time-limit", "0"], "--time-limit 0.0: give a positive number"),
        (["--topology", "laptop", "--explain", "itme"], "no table 'itme'; did you mean 'item'?"),
        (["--topology", "laptop", "--out", "."], ". is a folder"),
    ],
)
def test_words_that_make_no_sense_end_with_2(
    tables: str, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
):
    assert cli.main(["plan", tables, *words]) == 2
    told = capsys.readouterr().err
    assert told.startswith("tutorec plan: ")
    assert message in told
    assert told.count("\n") == 1


def test_unknown_table_is_refused_before_planning(tables: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cli, "_planner", lambda *_: pytest.fail("a search may take a minute"))
    assert cli.main(["plan", tables, "--topology", "laptop", "--explain", "zzz"]) == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "tables.yaml"),
        (
            "tables: [{name: a, name: b, num_embeddings: 4, embedding_dim: 4}]",
            "tables.yaml: line 1: 'name' is given 2 times",
        ),
        (
            "tables: [{name: a, num_embeddings: 1e30, embedding_dim: 4}]",
            "tables.yaml: table 'a': num_embeddings is 1,000",
        ),
        ("tables: [", "tables.yaml: this is not YAML"),
        (
            TABLES.replace("1000", "many"),
            "tables.yaml: table 'item': num_embeddings must be a positive whole number, got 'many'",
        ),
        (
            TABLES.replace("row_wise", "row"),
            "table 'user' names 'row', which ShardingType does not have",
        ),
        (
            "tables: [{name: a, num_embeddings: 8, embedding_dim: 4, pin: [-1]}]",
            "of table 'a' names rank -1",
        ),
        (
            "tables: [{name: a, num_embeddings: 8, embedding_dim: 4, pooling_factors: x}]",
            "of table 'a' has 'x'",
        ),
        (
            "{tables: [{name: a, num_embeddings: 8, embedding_dim: 4}], batch_size: 0.5}",
            "batch_size=0.5",
        ),
        (
            TABLES + "fused_params: {optimizer: magic}",
            "tables.yaml: fused_params names the optimizer 'magic'",
        ),
    ],
)
def test_file_that_is_wrong_ends_with_2(
    tmp_path: Path, text: str | None, message: str, capsys: pytest.CaptureFixture[str]
):
    path = tmp_path / "tables.yaml"
    if text is not None:
        path.write_text(text, encoding="utf-8")
    assert cli.main(["plan", str(path), "--topology", "laptop"]) == 2
    assert message in capsys.readouterr().err


def test_example_of_the_help_is_the_documented_one():
    shown = plan_parser().epilog or ""
    example = shown.split("fields:\n")[1].split("examples:")[0]
    documented = (
        (table_files.__doc__ or "").split(".. code-block:: yaml\n")[1].split("\nKeys of a table")[0]
    )
    assert tables_of(example).constraints == tables_of(documented).constraints
    assert example.split() == documented.split()


def test_kinds_of_the_help_are_all_presets():
    from tutorec.distributed.planner.constants import HARDWARE

    told = plan_parser().format_help().replace("\n", " ")
    assert all(kind in told for kind in HARDWARE)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("stream", [Terminal(), io.StringIO()])
def test_a_terminal_shows_how_long_planning_has_taken(
    stream: io.StringIO, monkeypatch: pytest.MonkeyPatch
):
    clock, shown = itertools.count(step=3), isinstance(stream, Terminal)
    # each look at the clock finds three seconds gone
    monkeypatch.setattr("tqdm.std.time", lambda: float(next(clock)))
    monkeypatch.setattr("sys.stderr", stream)
    monkeypatch.setattr(cli, "_TICK_SECONDS", 0.001)
    with cli._bar_while_planning():
        for _ in range(20_000 if shown else 0):
            if "planning:" in stream.getvalue():
                break
            time.sleep(0.001)
    assert ("planning:" in stream.getvalue()) is shown
