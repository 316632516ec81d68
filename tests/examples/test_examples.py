"""The scripts: on ranks of a pool, and in real processes under torchrun that stop and go on."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tutorec.datasets.random import shop
from tutorec.datasets.sessions import Sessions
from tutorec.examples import dlrm, running, sequence, two_tower
from tutorec.examples.running import KS, parser, samples_of_rank
from tutorec.spmd import Ranks

SMALL = "--rows 2000 --test-rows 500 --users 40 --items 60 --batch-size 100 --no-progress".split()
SESSIONS = (
    "--rows 2000 --test-rows 500 --items 60 --batch-size 100 --epochs 2 --no-progress".split()
)
MAINS = {dlrm.main: SMALL, two_tower.main: SMALL, sequence.main: SESSIONS}


def _run(main: Callable[[list[str]], int], words: list[str]) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert main(words) == 0
    return out.getvalue()


def test_dlrm_says_on_rank_0_how_near_it_comes_to_the_best_auc(ranks: Callable[..., Ranks]) -> None:
    first, second = ranks(2).run(_run, dlrm.main, SMALL)
    assert second == ""
    best = shop(rows=2000, test_rows=500, users=40, items=60).best_auc
    lines = first.splitlines()
    assert lines[1].startswith("2 rank(s), 50 samples each: ")
    assert re.fullmatch(
        r"before: AUC 0\.\d{4}, .* over 500 samples; best possible AUC " + f"{best:.4f}", lines[2]
    )
    assert lines[3].startswith("40 steps, 4,000 samples, ")
    assert re.fullmatch(r"after: AUC 0\.\d{4}, .*", lines[4])


@pytest.mark.parametrize("negatives", ["in_batch", "random"])
def test_two_tower_says_what_is_found_beside_what_is_popular(
    ranks: Callable[..., Ranks], negatives: str
) -> None:
    first, second = ranks(2).run(_run, two_tower.main, [*SMALL, "--negatives", negatives])
    assert second == ""
    assert first.splitlines()[2].startswith("40 steps, ")
    for k, line in zip(KS, first.splitlines()[3:], strict=True):
        of_model, popular, best = map(float, re.findall(r"0\.\d{4}", line))
        assert line.startswith(f"recall@{k}: ") and f"the {k} most popular" in line
        assert 0 < popular <= best and 0 < of_model <= 1


def test_sequence_finds_more_than_what_is_popular_and_reports_it(
    ranks: Callable[..., Ranks], tmp_path: Path
) -> None:
    words = [*SESSIONS, "--rows", "20000", "--report", str(tmp_path / "report.json")]
    first, second = ranks(2).run(_run, sequence.main, words)
    assert second == ""
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["ranks"] == 2 and report["steps"] == len(report["losses"]) == 400
    assert report["samples"] == 40_000 and report["options"]["rows"] == "20000"
    store = Sessions(items=60, rows=20_000, test_rows=500)
    for k, line in zip(KS, first.splitlines()[3:], strict=True):
        of_model, popular, best = map(float, re.findall(r"0\.\d{4}", line))
        assert of_model == pytest.approx(report["metrics"][f"recall@{k}"], abs=1e-4)
        assert best == pytest.approx(store.best_recall(k), abs=1e-4)
        # Of 60 products 50 are shown at the last k, where the model may find all that can be found.
        assert popular < of_model <= best


def _stopped_and_gone_on(main: Callable[[list[str]], int], folder: Path) -> list[str]:
    """What is said by a run that stops after some steps, and by another that goes on."""
    words = [*MAINS[main], "--checkpoints", str(folder), "--save-every", "8"]
    with contextlib.redirect_stdout(io.StringIO()) as out:
        main([*words, "--steps", "17"])
        main(words)
    return out.getvalue().splitlines()


@pytest.mark.slow
@pytest.mark.parametrize("main", MAINS)
def test_a_run_that_was_stopped_goes_on_and_ends_like_one_that_was_not(
    ranks: Callable[..., Ranks], main: Callable[[list[str]], int], tmp_path: Path
) -> None:
    whole = ranks(2).run(_run, main, MAINS[main])[0].splitlines()
    lines = ranks(2).run(_stopped_and_gone_on, main, tmp_path)[0]
    assert "goes on from step-17, saved by 2 rank(s) after 1,700 samples" in lines
    ends = -1 if main is dlrm.main else -3
    assert lines[ends:] == whole[ends:]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-32", "step-40"]


def test_a_batch_that_ranks_cannot_share_is_refused_with_one_that_they_can() -> None:
    options = parser("x", "y").parse_args(["--batch-size", "10"])
    group: Any = SimpleNamespace(size=lambda: 4)
    with pytest.raises(ValueError, match=r"10: 4 ranks.*12"):
        samples_of_rank(options, group)
    assert samples_of_rank(argparse.Namespace(batch_size=12), group) == 3


def test_ranks_wait_for_each_other_as_long_as_the_command_line_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(running, "init", lambda timeout: timeout)
    assert running.start(parser("x", "y").parse_args(["--timeout", "7"])) == 7
    assert running.start(parser("x", "y").parse_args([])) == 600


def test_saving_after_no_steps_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        dlrm.main(["--save-every", "0"])
    assert "argument --save-every: '0' is not a whole number from 1 on" in capsys.readouterr().err


def _start(words: list[str], ranks: int) -> str:
    torchrun = (
        ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        if ranks > 1
        else []
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *torchrun, "-m", "tutorec.examples.dlrm", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    # the bar belongs to standard error, on rank 0 alone
    assert done.stderr.count("| 1/") <= 1
    return done.stdout


@pytest.mark.slow
def test_torchrun_and_one_process_take_turns_and_end_like_one_run(
    ranks: Callable[..., Ranks], tmp_path: Path
) -> None:
    words = [word for word in SMALL if word != "--no-progress"]
    saved = [*words, "--checkpoints", str(tmp_path), "--save-every", "10"]
    under_torchrun = _start([*saved, "--steps", "23"], ranks=2)
    assert "2 rank(s), 50 samples each" in under_torchrun
    alone = ranks(1).run(_run, dlrm.main, saved)[0]
    assert "goes on from step-23, saved by 2 rank(s) after 2,300 samples" in alone
    whole = ranks(1).run(_run, dlrm.main, words)[0]
    loss = [float(re.findall(r"log loss (0\.\d+)", text)[-1]) for text in (alone, whole)]
    assert loss[0] == pytest.approx(loss[1], abs=2e-4)


# The process kills itself as soon as it has a checkpoint: no other process, which a busy machine
# may delay, has to be in time.
KILLED = """
import os, pathlib, signal, sys, threading, time
from tutorec.distributed.checkpoint.reading import latest_checkpoint
from tutorec.examples import dlrm

def kill():
    while latest_checkpoint(pathlib.Path(sys.argv[1])) is None:
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)

threading.Thread(target=kill, daemon=True).start()
dlrm.main(sys.argv[2:])
"""


@pytest.mark.slow
def test_a_run_that_was_killed_goes_on_and_ends_to_the_digit_like_one_that_was_not(
    ranks: Callable[..., Ranks], tmp_path: Path
) -> None:
    words = [*SMALL, "--epochs", "10"]
    saved = [*words, "--checkpoints", str(tmp_path), "--save-every", "5"]
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path), *saved],
        stdout=subprocess.PIPE,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert killed.returncode == -signal.SIGKILL and b"after: " not in killed.stdout
    gone_on = _start(saved, ranks=1)
    assert "goes on from step-" in gone_on
    assert gone_on.splitlines()[-1] == ranks(1).run(_run, dlrm.main, words)[0].splitlines()[-1]


def test_the_tables_are_on_the_meta_device_until_they_are_sharded() -> None:
    options = parser("x", "y").parse_args([])
    store = shop(rows=100)
    for model in (
        dlrm.build(store, options),
        two_tower.build(store, torch.ones(200), _with_negatives(options)),
    ):
        tables = [
            parameter for name, parameter in model.named_parameters() if "embedding_bags" in name
        ]
        assert len(tables) == 2 and all(table.is_meta for table in tables)


def _with_negatives(options: argparse.Namespace) -> argparse.Namespace:
    return argparse.Namespace(**vars(options), negatives="in_batch")


@pytest.mark.parametrize("main", [dlrm.main, two_tower.main])
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--rows", "x"], "argument --rows: 'x' is not a whole number from 1 on"),
        (["--test-rows", "0"], "argument --test-rows: '0' is not a whole number from 1 on"),
        (["--users", "-5"], "argument --users: '-5' is not a whole number from 1 on"),
        (["--batch-size", "0"], "argument --batch-size: '0' is not a whole number from 1 on"),
        (["--columns", "0"], "argument --columns: '0' is not a whole number from 1 on"),
        (["--steps", "-1"], "argument --steps: '-1' is not a whole number from 0 on"),
        (["--epochs", "1.5"], "argument --epochs: '1.5' is not a whole number from 0 on"),
        (["--seed", "-1"], "argument --seed: '-1' is not a whole number from 0 on"),
        (
            ["--rate", "nan"],
            "argument --rate: 'nan' is not a learning rate, a finite number from 0 on",
        ),
        (["--table-rate", "-1"], "argument --table-rate: '-1' is not a learning rate"),
        (
            ["--checkpoints", "{}/file"],
            "argument --checkpoints: '{}/file' cannot be a folder for checkpoints",
        ),
        (
            ["--checkpoints", "{}/file/in"],
            "argument --checkpoints: '{}/file/in' cannot be a folder for checkpoints",
        ),
    ],
)
def test_options_that_cannot_be_are_refused_before_anything_is_started(
    main: Callable[[list[str]], int],
    words: list[str],
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit) as ended:
        main([word.replace("{}", str(tmp_path)) for word in words])
    assert ended.value.code == 2
    assert said.replace("{}", str(tmp_path)) in capsys.readouterr().err


def test_a_folder_for_checkpoints_is_made_before_training(tmp_path: Path) -> None:
    made = parser("x", "y").parse_args(["--checkpoints", str(tmp_path / "new" / "deep")])
    assert made.checkpoints.is_dir()
    assert (
        parser("x", "y").parse_args(["--checkpoints", "memory://runs/x"]).checkpoints
        == "memory://runs/x"
    )
