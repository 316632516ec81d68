from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from tutorec.datasets.random import _BLOCK_ROWS, CRITEO_FEATURES, DENSE_NAMES, Shop, shop
from tutorec.datasets.utils import Batch
from tutorec.models.baseline import click_count_baseline
from tutorec.models.dlrm import DLRM, DLRMTrain
from tutorec.models.metrics import auc
from tutorec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from tutorec.modules.embedding_modules import EmbeddingBagCollection


@pytest.fixture(scope="module")
def small() -> Shop:
    return shop(users=50, items=30, rows=1_000, test_rows=400, seed=3)


def _row_lists(batches: list[Batch]) -> list[tuple]:
    """Every row of the batches as plain values."""
    rows = []
    for batch in batches:
        bags = [batch.sparse_features[key].to_dense() for key in ("user", "item", "clicked")]
        for i, (dense, label) in enumerate(
            zip(batch.dense_features.tolist(), batch.labels.tolist(), strict=True)
        ):
            rows.append((*(tuple(bag[i].tolist()) for bag in bags), tuple(dense), label))
    return rows


def test_batches_hold_named_features_of_the_right_shape(small: Shop) -> None:
    batch = next(small.batches(64))
    assert batch.dense_features.shape == (64, len(DENSE_NAMES))
    assert batch.sparse_features.keys() == ["user", "item", "clicked"]
    assert batch.sparse_features.stride() == 64
    assert batch.labels.shape == (64,) and set(batch.labels.tolist()) <= {0.0, 1.0}
    assert batch.sparse_features.weights_or_none() is None


def test_ids_fit_their_tables_and_some_lists_are_empty(small: Shop) -> None:
    rows = small.rows(0, 1_000)
    assert rows.user.min() >= 0 and rows.user.max() < 50
    assert max(rows.item.max(), rows.clicked.max()) < 30
    assert rows.clicked_lengths.min() == 0 and 1 < rows.clicked_lengths.max() <= 8


def test_equal_seeds_give_equal_rows_and_others_do_not() -> None:
    sizes = {"users": 50, "items": 30, "rows": 200, "test_rows": 50}
    one, same, other = (shop(**sizes, seed=seed).rows(0, 200) for seed in (1, 1, 2))
    for name in one.__dataclass_fields__:
        assert np.array_equal(getattr(one, name), getattr(same, name)), name
    assert not np.array_equal(one.user, other.user)


def test_rows_do_not_depend_on_batch_size(small: Shop) -> None:
    assert _row_lists(list(small.batches(7))) == _row_lists(list(small.batches(256)))


def test_rows_do_not_depend_on_how_many_rows_there_are(small: Shop) -> None:
    longer = shop(users=50, items=30, rows=2_000, test_rows=400, seed=3)
    assert np.array_equal(small.rows(0, 1_000).label, longer.rows(0, 1_000).label)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_ranks_batches_side_by_side_are_the_batch_of_one_process(
    small: Shop, world_size: int
) -> None:
    alone = list(small.batches(32 * world_size))
    per_rank = [
        list(small.batches(32, rank=rank, world_size=world_size)) for rank in range(world_size)
    ]
    assert {len(batches) for batches in per_rank} == {len(alone)}
    for step, batch in enumerate(alone):
        assert _row_lists([batches[step] for batches in per_rank]) == _row_lists([batch])


def test_rows_across_a_block_boundary_join(small: Shop) -> None:
    wide = shop(users=50, items=30, rows=_BLOCK_ROWS + 100, test_rows=10, seed=3)
    across = wide.rows(_BLOCK_ROWS - 5, _BLOCK_ROWS + 5)
    assert len(across) == 10 and len(across.clicked) == across.clicked_lengths.sum()
    assert np.array_equal(across.user[5:], wide.rows(_BLOCK_ROWS, _BLOCK_ROWS + 5).user)


def test_splits_differ_and_epochs_repeat(small: Shop) -> None:
    assert small.rows(0, 50).user.tolist() != small.rows(0, 50, "test").user.tolist()
    assert _row_lists(list(small.batches(500, epochs=2))) == 2 * _row_lists(
        list(small.batches(500))
    )


def test_best_auc_is_the_auc_of_the_planted_probabilities(small: Shop) -> None:
    rows = small.rows(0, 400, "test")
    clicks, others = rows.probability[rows.label == 1], rows.probability[rows.label == 0]
    assert small.best_auc == pytest.approx((clicks[:, None] > others[None, :]).mean(), abs=1e-12)


def test_labels_follow_the_planted_probabilities() -> None:
    rows = shop(rows=60_000).rows(0, 60_000)
    for low in np.arange(0.0, 1.0, 0.2):
        inside = (rows.probability >= low) & (rows.probability < low + 0.2)
        deviation = (
            np.sqrt((rows.probability[inside] * (1 - rows.probability[inside])).sum())
            / inside.sum()
        )
        assert abs(rows.label[inside].mean() - rows.probability[inside].mean()) < 5 * deviation


def test_popularity_follows_the_power_law() -> None:
    world = shop(users=100, items=100, rows=100_000, exponent=1.0)
    counts = np.sort(np.bincount(world.rows(0, 100_000).user, minlength=100))[::-1]
    expected = np.arange(1, 101) ** -1.0
    assert np.allclose(counts[:20] / counts.sum(), (expected / expected.sum())[:20], rtol=0.1)


def test_exponent_zero_makes_all_ids_alike() -> None:
    counts = np.bincount(
        shop(users=10, rows=20_000, exponent=0.0).rows(0, 20_000).user, minlength=10
    )
    assert counts.min() > 0.8 * counts.max()


def test_weighted_batches_weigh_clicks_by_dwell_and_ids_by_one(small: Shop) -> None:
    features = next(small.batches(100, weighted=True)).sparse_features
    assert features["user"].weights().tolist() == [1.0] * 100
    clicked = features["clicked"]
    sums = torch.tensor(
        [float(bag.sum()) for bag in clicked.weights().split(clicked.lengths().tolist())]
    )
    torch.testing.assert_close(sums, (clicked.lengths() > 0).float())


def test_drop_last_leaves_full_batches_only(small: Shop) -> None:
    assert [len(batch.labels) for batch in small.batches(300, drop_last=True)] == [300, 300, 300]


def test_head_shows_columns_in_the_units_of_the_shop(small: Shop) -> None:
    lines = small.head(3).splitlines()
    assert lines[0].split() == [
        "click",
        "user",
        "item",
        "clicked",
        "dwell",
        "hour",
        "price",
        "age",
        "discount",
    ]
    assert len(lines) == 4 and all(line.endswith("%") for line in lines[1:])


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"users": 0}, "users=0"),
        ({"rows": -1}, "rows=-1"),
        ({"exponent": -0.5}, "exponent=-0.5"),
        ({"max_clicked": -1}, "max_clicked=-1"),
    ],
)
def test_shop_with_a_bad_size_names_it(changed: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        shop(**changed)


def test_unknown_split_and_rows_outside_are_named(small: Shop) -> None:
    with pytest.raises(ValueError, match="no split 'valid'"):
        small.batches(4, split="valid").__next__()  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"rows 0\.\.401.*split 'test'.*rows 0\.\.400"):
        small.rows(0, 401, "test")


def test_write_criteo_writes_equal_bytes_twice(small: Shop, tmp_path: Path) -> None:
    first = small.write_criteo(tmp_path / "one.gz", rows=50).read_bytes()
    assert first == small.write_criteo(tmp_path / "two.gz", rows=50).read_bytes()


def test_write_criteo_of_more_rows_than_there_are_names_both(small: Shop, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"rows 0\.\.1001 .* has rows 0\.\.1000"):
        small.write_criteo(tmp_path / "x.tsv", rows=1_001)
    assert not (tmp_path / "x.tsv").exists()


@pytest.mark.slow
def test_a_small_click_model_closes_the_gap_to_the_planted_optimum() -> None:
    world = shop(rows=80_000)
    tables = [
        EmbeddingBagConfig(500, 16, "t_user", feature_names=["user"], pooling=PoolingType.MEAN),
        EmbeddingBagConfig(
            200, 16, "t_item", feature_names=["item", "clicked"], pooling=PoolingType.MEAN
        ),
    ]
    torch.manual_seed(0)
    model = DLRMTrain(DLRM(EmbeddingBagCollection(tables), 4, [32, 16], [32, 1]))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for batch in world.batches(512, epochs=2):
        optimizer.zero_grad()
        model(batch)[0].backward()
        optimizer.step()
    with torch.no_grad():
        scores = torch.cat([model(batch)[1][1] for batch in world.batches(4096, split="test")])
    labels = world.labels("test")
    naive = auc(
        labels, click_count_baseline(world.batches(4096), world.batches(4096, split="test"))
    )
    assert 0.5 < naive < world.best_auc - 0.15
    assert (auc(labels, scores) - naive) / (world.best_auc - naive) > 0.8


def test_criteo_features_name_the_shops_features(small: Shop) -> None:
    assert list(CRITEO_FEATURES) == ["user", "item", "clicked"]


def test_best_items_are_those_that_clicks_are_on_most_often() -> None:
    # one user and no recent clicks: every row asks the same, so that clicks can be counted
    world = shop(users=1, items=6, rows=200_000, test_rows=100, max_clicked=0)
    rows = world.rows(0, 200_000)
    clicks = np.bincount(rows.item[rows.label == 1], minlength=6)
    assert world.best_items(6, 0, 1, "train")[0].tolist() == np.argsort(-clicks).tolist()


def test_best_recall_rises_with_k_and_beats_the_popular(small: Shop) -> None:
    rows, count = small.rows(0, small.counts["test"], "test"), small.table_rows["item"]
    found = [small.best_recall(k) for k in (1, 3, count)]
    clicked = rows.item[rows.label == 1]
    most_popular = np.bincount(clicked, minlength=count).max() / len(clicked)
    assert most_popular < found[0] < found[1] < found[2] == 1.0


def test_a_pickled_shop_leaves_its_rows_out_and_generates_them_anew():
    store = shop(users=20, items=10, rows=40_000)
    before = len(pickle.dumps(store))
    expected = store.rows(30_000, 30_010)
    assert len(pickle.dumps(store)) == before

    copy = pickle.loads(pickle.dumps(store))
    assert copy.rows(30_000, 30_010).user.tolist() == expected.user.tolist()
