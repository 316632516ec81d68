"""DLRM on Criteo's files: both layouts, three interactions, MLPerf's bags."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from examples.criteo_days import CRITEO, write_days

from tutorec.datasets.criteo import CAT_FEATURE_COUNT
from tutorec.distributed.checkpoint.manager import CheckpointManager
from tutorec.examples import criteo
from tutorec.examples.running import parser
from tutorec.sparse.hashing import mixing_hash
from tutorec.spmd import Ranks


def _run(words: list[str]) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert criteo.main(words) == 0
    return out.getvalue()


@pytest.mark.slow
@pytest.mark.parametrize("interaction", ["original", "dcn", "projection"])
def test_every_interaction_learns_on_two_ranks(
    ranks: Callable[..., Ranks], tmp_path: Path, interaction: str
) -> None:
    folder, report = write_days(tmp_path, {"train": 7000}), tmp_path / "report.json"
    words = [
        str(folder),
        *CRITEO,
        "--epochs",
        "3",
        "--interaction",
        interaction,
        "--report",
        str(report),
    ]
    lines = ranks(2).run(_run, words)[0].splitlines()
    assert lines[1].startswith("before: AUC ") and lines[1].endswith(" over 1,000 samples")
    assert lines[2].startswith("180 steps, 18,000 samples, ")
    found = json.loads(report.read_text())
    assert found["metrics"]["auc"] > 0.55 and len(found["plan"]) == CAT_FEATURE_COUNT
    assert np.mean(found["losses"][-60:]) < np.mean(found["losses"][:60])


def test_a_run_on_one_rank_goes_on_on_two_and_ends_like_one_run(
    ranks: Callable[..., Ranks], tmp_path: Path
) -> None:
    folder = write_days(tmp_path, {"day_0": 1000, "day_1": 700, "day_2": 200})
    words, saved = [str(folder), *CRITEO], ["--checkpoints", str(tmp_path / "run")]
    whole = ranks(2).run(_run, words)[0].splitlines()
    assert whole[2].startswith("17 steps, 1,700 samples, ") and whole[-1].endswith(
        " over 200 samples"
    )
    ranks(1).run(_run, [*words, *saved, "--steps", "8"])
    gone_on = ranks(2).run(_run, [*words, *saved])[0].splitlines()
    assert gone_on[1] == "goes on from step-8, saved by 1 rank(s) after 800 samples"
    assert CheckpointManager(tmp_path / "run").latest() is not None
    losses = [float(lines[-1].split("log loss ")[1].split()[0]) for lines in (whole, gone_on)]
    assert losses[0] == pytest.approx(losses[1], abs=2e-4)


def test_files_are_read_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    folder = write_days(tmp_path, {f"day_{day}": 10 + day for day in range(11)})
    options = parser("x", "y").parse_args([])
    options.mlperf, options.hash_rows = None, 50
    train, test = criteo.read(folder, criteo.shape_of(options), batch_size=8)
    assert len(torch.cat([batch.labels for batch in test(8)])) == 20
    labels = [np.load(folder / f"day_{day}_labels.npy").ravel() for day in range(10)]
    read = torch.cat([batch.labels for batch in train(8)])
    assert read.tolist() == np.concatenate(labels).tolist()


def test_mlperf_has_its_tables_and_bags(tmp_path: Path) -> None:
    folder = write_days(tmp_path, {"train": 70})
    options = parser("x", "y").parse_args([])
    options.mlperf, options.interaction = 1e-3, None
    shape = criteo.shape_of(options)
    assert sum(shape.bags) == 214 and max(shape.rows) == 40_000 and min(shape.rows) == 1
    batch = next(criteo.read(folder, shape, batch_size=8)[0](8))
    features = batch.sparse_features
    assert features.lengths().view(CAT_FEATURE_COUNT, 8).T.tolist() == [list(shape.bags)] * 8
    for key, rows in zip(features.keys(), shape.rows, strict=True):
        assert int(features[key].values().max()) < rows
    # the bag of the 21st feature: its id, and 99 hashes of it
    bag = features[features.keys()[20]].to_dense()[3]
    own = int(np.load(folder / "train_sparse.npy")[3, 20]) % shape.rows[20]
    assert bag[0] == own and torch.equal(
        bag[1:], mixing_hash(own * 100 + torch.arange(1, 100), shape.rows[20], seed=20)
    )
    width = sum(
        p.shape[1]
        for name, p in criteo.build(shape, options).named_parameters()
        if "embedding_bags" in name
    )
    assert width == 26 * 128


def test_a_folder_without_files_is_told_how_to_make_them(tmp_path: Path) -> None:
    options = parser("x", "y").parse_args([])
    options.mlperf, options.hash_rows = None, 50
    with pytest.raises(FileNotFoundError, match="npy_preproc_criteo"):
        criteo.read(tmp_path, criteo.shape_of(options), 8)


def test_the_example_of_the_help_has_all_words_that_are_needed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        criteo.main(["--help"])
    example = capsys.readouterr().out.splitlines()[-1]
    words = example.split(criteo.NAME)[1].split()
    with pytest.raises(FileNotFoundError, match=r"folder has no \*_labels.npy"):
        criteo.main(words)
