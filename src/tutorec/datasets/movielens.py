"""The ratings of MovieLens 20M and 25M, with the names of ``torchrec.datasets.movielens``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from torch.utils.data import IterDataPipe

from tutorec.datasets.utils import LoadFiles, ReadLinesFromCSV, safe_cast

RATINGS_FILENAME = "ratings.csv"
MOVIES_FILENAME = "movies.csv"
DEFAULT_RATINGS_COLUMN_NAMES: list[str] = ["userId", "movieId", "rating", "timestamp"]
DEFAULT_MOVIES_COLUMN_NAMES: list[str] = ["movieId", "title", "genres"]
DEFAULT_COLUMN_NAMES: list[str] = DEFAULT_RATINGS_COLUMN_NAMES + DEFAULT_MOVIES_COLUMN_NAMES[1:]
COLUMN_TYPE_CASTERS: list[Callable[[Any], Any]] = [
    partial(safe_cast, dest_type=type(default), default=default)
    for default in (0, 0, 0.0, 0, "", "")
]

RowMapper = Callable[[list[str]], Any] | None


def _default_row_mapper(example: list[str]) -> dict[str, float | int | str]:
    columns = zip(DEFAULT_COLUMN_NAMES, COLUMN_TYPE_CASTERS, example, strict=False)
    return {name: cast(field) for name, cast, field in columns}


class _Ratings(IterDataPipe):
    """The lines of ratings.csv, on request with the title and genres of each movie."""

    def __init__(
        self, root: str, with_movies: bool, row_mapper: RowMapper, open_kw: dict[str, Any]
    ) -> None:
        super().__init__()
        self.root = root
        self.with_movies = with_movies
        self.row_mapper = row_mapper
        self.open_kw = open_kw

    def __iter__(self) -> Iterator[Any]:
        movies = (
            {movie: rest for movie, *rest in self._lines(MOVIES_FILENAME)}
            if self.with_movies
            else {}
        )

        for line in self._lines(RATINGS_FILENAME):
            row = line + movies[line[1]] if self.with_movies else line
            yield row if self.row_mapper is None else self.row_mapper(row)

    def _lines(self, name: str) -> ReadLinesFromCSV:
        files = LoadFiles([str(Path(self.root) / name)], mode="r", **self.open_kw)
        return ReadLinesFromCSV(files, skip_first_line=True)


def movielens_20m(
    root: str,
    *,
    include_movies_data: bool = False,
    row_mapper: RowMapper = _default_row_mapper,
    **open_kw: Any,
) -> IterDataPipe:
    """The ratings of MovieLens 20M, as dictionaries of columns.

    Args:
        root: folder of ratings.csv and movies.csv.
        include_movies_data: add title and genres of the movie.
        row_mapper: makes a sample of the fields of a line; None keeps the list of fields.
        open_kw: passed on to :class:`~tutorec.datasets.utils.LoadFiles`.

    Returns:
        A pipe of samples.

    Example:
        >>> import tempfile, pathlib
        >>> from tutorec.datasets.movielens import movielens_20m
        >>> root = pathlib.Path(tempfile.mkdtemp())
        >>> _ = (root / "ratings.csv").write_text(
        ...     "userId,movieId,rating,timestamp" + chr(10) + "1,2,3.5,1112486027"
        ... )
        >>> list(movielens_20m(str(root)))
        [{'userId': 1, 'movieId': 2, 'rating': 3.5, 'timestamp': 1112486027}]
    """
    return _Ratings(root, include_movies_data, row_mapper, open_kw)


# The files of both have the same form.
movielens_25m = movielens_20m
