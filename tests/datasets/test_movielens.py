from __future__ import annotations

from pathlib import Path

import pytest

from tutorec.datasets.movielens import DEFAULT_COLUMN_NAMES, movielens_20m, movielens_25m


@pytest.fixture
def root(tmp_path: Path) -> str:
    (tmp_path / "ratings.csv").write_text(
        "userId,movieId,rating,timestamp\n7,2,3.5,100\n8,1,,200\n"
    )
    (tmp_path / "movies.csv").write_text(
        'movieId,title,genres\n1,Heat,Action|Crime\n2,"Jumanji, the game",Comedy\n'
    )
    return str(tmp_path)


def test_ratings_are_numbers_and_missing_ones_zero(root: str) -> None:
    for read in (movielens_20m, movielens_25m):
        assert list(read(root)) == [
            {"userId": 7, "movieId": 2, "rating": 3.5, "timestamp": 100},
            {"userId": 8, "movieId": 1, "rating": 0.0, "timestamp": 200},
        ]


def test_movies_are_joined_in_every_pass(root: str) -> None:
    data = movielens_25m(root, include_movies_data=True)
    for _ in range(2):
        rows = [list(row.items()) for row in data]
        assert rows[0] == list(
            zip(DEFAULT_COLUMN_NAMES, [7, 2, 3.5, 100, "Jumanji, the game", "Comedy"], strict=True)
        )
        assert rows[1][-2:] == [("title", "Heat"), ("genres", "Action|Crime")]


def test_without_a_row_mapper_the_fields_are_text(root: str) -> None:
    assert list(movielens_20m(root, row_mapper=None)) == [
        ["7", "2", "3.5", "100"],
        ["8", "1", "", "200"],
    ]
    assert list(movielens_20m(root, row_mapper=len).limit(1)) == [4]
