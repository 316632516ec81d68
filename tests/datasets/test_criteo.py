from __future__ import annotations

import gzip
import re
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch

from tutorec.datasets import criteo_files
from tutorec.datasets.criteo import (
    CAT_FEATURE_COUNT,
    DAYS,
    DEFAULT_CAT_NAMES,
    DEFAULT_INT_NAMES,
    DEFAULT_LABEL_NAME,
    INT_FEATURE_COUNT,
    CriteoColumns,
    CriteoDataset,
    read_criteo,
)
from tutorec.datasets.criteo_files import format_rows, write_rows
from tutorec.datasets.random import CRITEO_FEATURES, shop
from tutorec.sparse.hashing import mixing_hash

# The first two lines of the Kaggle challenge's train.txt, as published.
PUBLISHED = (
    "0\t1\t1\t5\t0\t1382\t4\t15\t2\t181\t1\t2\t\t2\t68fd1e64\t80e26c9b\tfb936136\t7b4723c4\t25c83c98\t7e0ccccf\tde7995b8\t1f89b562\ta73ee510\ta8cd5504\tb2cb9c98\t37c9c164\t2824a5f6\t1adce6ef\t8ba8b39a\t891b62e7\te5ba7672\tf54016b9\t21ddcdc9\tb1252a9d\t07b5194c\t\t3a171ecb\tc5c50484\te8b83407\t9727dd16\n"
    "0\t2\t0\t44\t1\t102\t8\t2\t2\t4\t1\t1\t\t4\t68fd1e64\tf0cf0024\t6f67f7e5\t41274cd7\t25c83c98\tfe6b92e5\t922afcc0\t0b153874\ta73ee510\t2b53e5fb\t4f1b46f3\t623049e6\td7020589\tb28479f6\te6c5b5cd\tc92f3b61\t07c540c4\tb04e4670\t21ddcdc9\t5840adea\t60f6221e\t\t3a171ecb\t43f13e8b\te8b83407\t731c3655\n"
)


def _random_columns(rows: int, seed: int = 0) -> CriteoColumns:
    rng = np.random.default_rng(seed)
    ints_known = rng.random((rows, INT_FEATURE_COUNT)) < 0.8
    cats_known = rng.random((rows, CAT_FEATURE_COUNT)) < 0.8
    return CriteoColumns(
        label=rng.integers(0, 2, rows),
        ints=np.where(ints_known, rng.integers(-3, 70_000, ints_known.shape), 0),
        ints_known=ints_known,
        cats=np.where(cats_known, rng.integers(0, 1 << 32, cats_known.shape), 0),
        cats_known=cats_known,
    )


def _assert_equal(one: CriteoColumns, other: CriteoColumns) -> None:
    for name in one.__dataclass_fields__:
        assert np.array_equal(getattr(one, name), getattr(other, name)), name


def test_constants_are_those_of_the_format() -> None:
    assert (INT_FEATURE_COUNT, CAT_FEATURE_COUNT, DAYS, DEFAULT_LABEL_NAME) == (13, 26, 24, "label")
    assert DEFAULT_INT_NAMES[0] == "int_0" and DEFAULT_INT_NAMES[-1] == "int_12"
    assert DEFAULT_CAT_NAMES[0] == "cat_0" and DEFAULT_CAT_NAMES[-1] == "cat_25"


def test_published_lines_are_read_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "train.txt"
    path.write_text(PUBLISHED)
    rows = read_criteo(path)
    assert rows.label.tolist() == [0, 0]
    assert rows.ints[0].tolist() == [1, 1, 5, 0, 1382, 4, 15, 2, 181, 1, 2, 0, 2]
    assert rows.ints_known[0].tolist() == [True] * 11 + [False, True]
    assert rows.cats[0, 0] == 0x68FD1E64 and rows.cats[1, 25] == 0x731C3655
    assert rows.cats_known.sum(axis=1).tolist() == [25, 25]
    assert format_rows(rows) == PUBLISHED.encode()


@pytest.mark.parametrize("name", ["day_0", "day_0.tsv.gz"])
def test_rows_survive_writing_and_reading(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(criteo_files, "_BLOCK_BYTES", 1_000)  # lines lie across the blocks' ends
    rows = _random_columns(300)
    _assert_equal(
        read_criteo(write_rows(tmp_path / name, [rows.slice(0, 123), rows.slice(123, 300)])), rows
    )


def test_a_row_with_everything_missing_is_a_row(tmp_path: Path) -> None:
    path = tmp_path / "x.tsv"
    path.write_text("1" + "\t" * 39 + "\n")
    rows = read_criteo(path)
    assert rows.label.tolist() == [1] and not rows.ints_known.any() and not rows.cats_known.any()
    batch = next(CriteoDataset(path, rows_per_table=10).batches(1))
    assert batch.sparse_features.values().numel() == 0 and batch.dense_features.tolist() == [
        [0.0] * 13
    ]


def test_last_line_without_newline_and_windows_line_ends_are_read(tmp_path: Path) -> None:
    path = tmp_path / "x.tsv"
    path.write_bytes(PUBLISHED.replace("\n", "\r\n").encode().rstrip(b"\r\n"))
    assert read_criteo(path).cats[:, 25].tolist() == [0x9727DD16, 0x731C3655]


def test_upper_case_and_short_ids_are_read(tmp_path: Path) -> None:
    path = tmp_path / "x.tsv"
    path.write_text("1" + "\t" * 14 + "FF\tab" + "\t" * 24 + "\n")
    assert read_criteo(path).cats[0, :2].tolist() == [0xFF, 0xAB]


def test_rows_limits_what_is_read(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "x.tsv", [_random_columns(50)])
    assert len(read_criteo(path, rows=7)) == 7


def _damage(line: int, change) -> bytes:
    lines = format_rows(_random_columns(400)).split(b"\n")
    lines[line - 1] = change(lines[line - 1])
    return b"\n".join(lines)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda line: line.rsplit(b"\t", 1)[0], "line 250: 39 fields found, 40 expected"),
        (lambda line: line + b"\t", "line 250: 41 fields found, 40 expected"),
        (lambda line: b"", "line 250: 1 fields found, 40 expected"),
        (lambda line: b"2" + line[1:], "line 250: column 'label' is '2', expected 0 or 1"),
        (lambda line: line[1:], "line 250: column 'label' is '', expected 0 or 1"),
        (
            lambda line: re.sub(rb"^(.)\t[^\t]*", rb"\1\t1.5", line),
            "line 250: column 'int_0' is '1.5'",
        ),
        (lambda line: re.sub(rb"^(.)\t[^\t]*", rb"\1\t-", line), "line 250: column 'int_0' is '-'"),
        (lambda line: line.rsplit(b"\t", 1)[0] + b"\txyz", "line 250: column 'cat_25' is 'xyz'"),
        (
            lambda line: line.rsplit(b"\t", 1)[0] + b"\t123456789",
            "line 250: column 'cat_25' is '123456789'",
        ),
    ],
)
@pytest.mark.parametrize("block_bytes", [1_000, 1 << 21])
def test_a_damaged_line_is_named(
    tmp_path: Path, change, message: str, block_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(criteo_files, "_BLOCK_BYTES", block_bytes)
    path = tmp_path / "day_3"
    path.write_bytes(_damage(250, change))
    with pytest.raises(ValueError, match=f"day_3, {re.escape(message)}"):
        read_criteo(path)
    with pytest.raises(ValueError, match=f"day_3, {re.escape(message)}"):
        list(CriteoDataset(path, rows_per_table=10).batches(64))


def test_every_rank_notices_a_line_of_the_wrong_length(tmp_path: Path) -> None:
    path = tmp_path / "day_0"
    path.write_bytes(_damage(1, lambda line: line + b"\t"))
    for rank in range(2):
        with pytest.raises(ValueError, match="line 1: 41 fields"):
            list(CriteoDataset(path, rows_per_table=10).batches(16, rank=rank, world_size=2))


def test_a_truncated_gzip_file_is_named(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "day_0.gz", [_random_columns(2_000)])
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"day_0\.gz: damaged gzip file"):
        read_criteo(path)


def test_text_called_gz_is_named(tmp_path: Path) -> None:
    path = tmp_path / "day_0.gz"
    path.write_text(PUBLISHED)
    with pytest.raises(ValueError, match=r"day_0\.gz: damaged gzip file"):
        read_criteo(path)


def test_a_file_without_newlines_does_not_fill_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(criteo_files, "_LONGEST_LINE", 1_000)
    monkeypatch.setattr(criteo_files, "_BLOCK_BYTES", 100)
    path = tmp_path / "blob"
    path.write_bytes(bytes(5_000))
    with pytest.raises(ValueError, match=r"blob: no newline within 1,100 bytes"):
        read_criteo(path)


def test_an_empty_file_and_a_missing_one_are_named(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.touch()
    with pytest.raises(ValueError, match=r"no rows in .*empty"):
        read_criteo(empty)
    with pytest.raises(ValueError, match="0 rows are not enough"):
        list(CriteoDataset(empty, rows_per_table=10).batches(4))
    with pytest.raises(FileNotFoundError, match=r"no Criteo file at .*absent"):
        CriteoDataset(tmp_path / "absent", rows_per_table=10)
    for rows in (0, 2**63):
        with pytest.raises(
            ValueError,
            match=rf"feature 'cat_0': rows={rows} must be a whole number, 1 to {2**63 - 1}",
        ):
            CriteoDataset(empty, rows_per_table=rows)


def test_a_file_that_was_cut_after_it_was_counted_is_named(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "day_0", [_random_columns(300)])
    data = CriteoDataset(path, rows_per_table=10)
    assert len(data) == 300
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:100]))
    batches = data.batches(64)
    assert len(next(batches).labels) == 64
    with pytest.raises(ValueError, match=r"day_0.*100 rows.*step 1.*rows 64 to 127"):
        next(batches)


def test_dense_features_are_logarithms_with_the_sign_kept(tmp_path: Path) -> None:
    path = tmp_path / "x.tsv"
    path.write_text("0\t0\t9\t-2" + "\t" * 36 + "\n")
    dense = next(CriteoDataset(path, rows_per_table=10).batches(1)).dense_features[0]
    torch.testing.assert_close(
        dense[:4], torch.tensor([0.0, np.log(10), -np.log(3), 0.0], dtype=torch.float32)
    )


def test_ids_are_hashed_to_rows_and_missing_ones_are_empty_bags(tmp_path: Path) -> None:
    rows = _random_columns(40)
    data = CriteoDataset(write_rows(tmp_path / "x.tsv", [rows]), rows_per_table=17)
    features = next(data.batches(40)).sparse_features
    assert features.keys() == DEFAULT_CAT_NAMES
    for column, name in enumerate(DEFAULT_CAT_NAMES):
        known = rows.cats_known[:, column]
        assert features[name].lengths().tolist() == known.astype(int).tolist()
        assert torch.equal(
            features[name].values(), mixing_hash(torch.from_numpy(rows.cats[known, column]), 17)
        )


def test_a_feature_of_several_columns_is_a_bag_of_the_ids_that_are_there(tmp_path: Path) -> None:
    rows = _random_columns(20)
    data = CriteoDataset(
        write_rows(tmp_path / "x.tsv", [rows]),
        rows_per_table={"bag": 1 << 40, "one": 11},
        features={"one": ["cat_5"], "bag": ["cat_3", "cat_1"]},
    )
    features = next(data.batches(20)).sparse_features
    expected = [[rows.cats[i, c] for c in (3, 1) if rows.cats_known[i, c]] for i in range(20)]
    assert features.keys() == ["one", "bag"]
    for bag, ids in zip(features["bag"].to_dense(), expected, strict=True):
        assert bag.tolist() == mixing_hash(torch.tensor(ids, dtype=torch.int64), 1 << 40).tolist()


def test_the_same_id_in_two_columns_falls_on_the_same_row(tmp_path: Path) -> None:
    path = tmp_path / "x.tsv"
    path.write_text("0" + "\t" * 14 + "0000002a\t0000002a" + "\t" * 24 + "\n")
    features = next(CriteoDataset(path, rows_per_table=1000).batches(1)).sparse_features
    assert features["cat_0"].values().tolist() == features["cat_1"].values().tolist()


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_ranks_read_the_rows_of_all_files_once(
    tmp_path: Path, world_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(criteo_files, "_BLOCK_BYTES", 3_000)
    rows = _random_columns(230)
    paths = [
        write_rows(tmp_path / "day_0", [rows.slice(0, 100)]),
        write_rows(tmp_path / "day_1.gz", [rows.slice(100, 230)]),
    ]
    data = CriteoDataset(paths, rows_per_table=1 << 20)
    assert len(data) == 230
    whole = data.to_batch(rows)
    per_rank = [
        list(data.batches(25, rank=rank, world_size=world_size)) for rank in range(world_size)
    ]
    assert len({len(batches) for batches in per_rank}) == 1
    in_order = [batch for step in zip(*per_rank, strict=True) for batch in step]
    assert torch.equal(
        torch.cat([batch.dense_features for batch in in_order]), whole.dense_features
    )
    assert torch.equal(torch.cat([batch.labels for batch in in_order]), whole.labels)
    for name in DEFAULT_CAT_NAMES:
        values = torch.cat([batch.sparse_features[name].values() for batch in in_order])
        assert torch.equal(values, whole.sparse_features[name].values())


def test_epochs_repeat_and_drop_last_leaves_full_batches(tmp_path: Path) -> None:
    data = CriteoDataset(write_rows(tmp_path / "x", [_random_columns(50)]), rows_per_table=100)
    assert [len(batch.labels) for batch in data.batches(20, epochs=2)] == [20, 20, 10] * 2
    assert [len(batch.labels) for batch in data.batches(20, drop_last=True)] == [20, 20]


def test_the_shop_comes_back_from_its_criteo_file(tmp_path: Path) -> None:
    world = shop(users=50, items=30, rows=300, test_rows=10)
    rows = world.rows(0, 300)
    data = CriteoDataset(
        world.write_criteo(tmp_path / "x.gz"), rows_per_table=1 << 40, features=CRITEO_FEATURES
    )
    batch = next(data.batches(300))
    for name, ids in (("user", rows.user), ("item", rows.item), ("clicked", rows.clicked)):
        assert torch.equal(
            batch.sparse_features[name].values(), mixing_hash(torch.from_numpy(ids), 1 << 40)
        )
    assert batch.sparse_features["clicked"].lengths().tolist() == rows.clicked_lengths.tolist()
    assert torch.equal(batch.labels, torch.from_numpy(rows.label).float())
    columns = read_criteo(tmp_path / "x.gz")
    assert columns.ints[:, 0].tolist() == rows.dense[:, 0].astype(int).tolist()
    assert not columns.cats_known[:, 10:].any()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rows_per_table": 0}, "feature 'cat_0': rows=0 must"),
        ({"rows_per_table": {"cat_0": 5}}, "feature 'cat_1': rows=None must"),
        (
            {"rows_per_table": 5, "features": {"user": ["cat_26"]}},
            r"feature 'user' is made of columns \['cat_26'\]",
        ),
        (
            {"rows_per_table": 5, "features": {"user": []}},
            r"feature 'user' is made of columns \[\]",
        ),
    ],
)
def test_bad_arguments_are_named(tmp_path: Path, arguments: dict, message: str) -> None:
    path = write_rows(tmp_path / "x", [_random_columns(1)])
    with pytest.raises(ValueError, match=message):
        CriteoDataset(path, **arguments)


def test_no_paths_raise() -> None:
    with pytest.raises(ValueError, match="paths is empty"):
        read_criteo([])


def test_progress_bar_is_silent_unless_wanted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_rows(tmp_path / "x", [_random_columns(50)])
    list(CriteoDataset(path, rows_per_table=10).batches(10))
    assert capsys.readouterr().err == ""
    list(CriteoDataset(path, rows_per_table=10, progress=True).batches(10, epochs=2))
    shown = capsys.readouterr().err
    assert "epoch 0" in shown and "epoch 1" in shown and "100%" in shown


def test_gz_holds_what_plain_holds(tmp_path: Path) -> None:
    rows = _random_columns(30)
    plain, packed = write_rows(tmp_path / "x", [rows]), write_rows(tmp_path / "x.gz", [rows])
    assert gzip.decompress(packed.read_bytes()) == plain.read_bytes()


def test_memory_does_not_grow_with_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(criteo_files, "_BLOCK_BYTES", 1 << 15)
    rows = _random_columns(500)
    peaks = []
    for copies in (4, 40):
        path = write_rows(tmp_path / f"{copies}.tsv", [rows] * copies)
        tracemalloc.start()
        for batch in CriteoDataset(path, rows_per_table=100).batches(100):
            assert len(batch.labels) == 100
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 2 * peaks[0] < path.stat().st_size  # ten times the file


@pytest.mark.parametrize("wrong", [-1, 1 << 32])
def test_an_id_that_is_not_of_32_bits_is_not_written(tmp_path: Path, wrong: int) -> None:
    rows = read_criteo(shop(rows=20).write_criteo(tmp_path / "day_0"))
    rows.cats[3, 0] = wrong
    rows.cats_known[3, 0] = True
    with pytest.raises(ValueError, match=rf"{wrong}.*Criteo's format holds 0 to 4294967295"):
        format_rows(rows)
