"""A shop whose catalogue turns over: every day products leave and new ids arrive.

A user looks at a product; did the user click? The probability is planted, as in
:mod:`tutorec.datasets.random`::

    sigmoid(bias + <user, product> + liking of the user + liking of the product)
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from tutorec._check import require_finite, require_int
from tutorec.datasets.utils import Batch
from tutorec.models.metrics import auc
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor

_BIAS = -1.0
_AFFINITY = 1.6
_LIKING = 0.4
_LARGEST_ID = 2**62


class TurningShop:
    """Visits of several days, with the best possible AUC of each.

    A new product takes the popularity of the one that it replaces, and nothing else of it.

    Args:
        users: Number of users; their ids are 0 .. users-1, and each is as active as any other.
        products: Products of a day.
        days: Number of days.
        visits: Visits of a day.
        turnover: Share of the products that is replaced before each day but the first.
        exponent: The k-th most popular product is shown in proportion to ``k ** -exponent``.
        factors: Length of the hidden vectors.
        seed: Everything is a function of it and of the arguments above.

    Attributes:
        catalogue: Ids of the products of each day [days, products]; what is in one column has one
            popularity.
        share: Share of the visits that each column has [products].

    Raises:
        ValueError: A size is not a whole number or too small, or ``turnover`` is not between 0 and
            1.

    Example:
        >>> shop = TurningShop(users=10, products=20, days=3, visits=50, turnover=0.1)
        >>> [
        ...     len(set(shop.catalogue[day].tolist()) - set(shop.catalogue[0].tolist()))
        ...     for day in range(3)
        ... ]
        [0, 2, 4]
        >>> next(shop.batches(day=1, batch_size=8)).sparse_features.keys()
        ['user', 'item']
    """

    def __init__(
        self,
        users: int = 300,
        products: int = 1000,
        days: int = 20,
        visits: int = 20_000,
        turnover: float = 0.05,
        exponent: float = 0.8,
        factors: int = 3,
        seed: int = 0,
    ) -> None:
        sizes = {
            "users": users,
            "products": products,
            "days": days,
            "visits": visits,
            "factors": factors,
        }
        for name, size in sizes.items():
            require_int(f"TurningShop: {name}", size, 1)
        require_int("TurningShop: seed", seed, 0)
        require_finite("TurningShop: exponent", exponent, 0)
        if not 0 <= turnover <= 1:
            raise ValueError(
                f"TurningShop: turnover={turnover}; it is a share of the products, between 0 and 1"
            )

        self.days = days
        self.visits = visits

        rng = np.random.default_rng([seed, 0])
        born = round(turnover * products)
        product_of_column = np.tile(np.arange(products), (days, 1))
        for day in range(1, days):
            replaced = rng.choice(products, born, replace=False)
            product_of_column[day:, replaced] = products + born * (day - 1) + np.arange(born)

        ids = rng.integers(0, _LARGEST_ID, products + born * (days - 1))
        mass = rng.permutation(np.arange(1, products + 1) ** -float(exponent))
        self.catalogue = torch.from_numpy(ids[product_of_column])
        self.share = torch.from_numpy(mass / mass.sum())

        hidden = [rng.standard_normal((count, factors)) for count in (users, len(ids))]
        liking = [_LIKING * rng.standard_normal(count) for count in (users, len(ids))]
        scale = _AFFINITY / np.sqrt(factors)
        self._visits = list[tuple[Tensor, ...]]()
        for day in range(days):
            user = rng.integers(0, users, visits)
            column = rng.choice(products, visits, p=self.share.numpy())
            product = product_of_column[day, column]
            affinity = scale * np.einsum("vf,vf->v", hidden[0][user], hidden[1][product])
            probability = 1 / (
                1 + np.exp(-(_BIAS + affinity + liking[0][user] + liking[1][product]))
            )
            label = (rng.random(visits) < probability).astype(np.float32)
            self._visits.append(
                tuple(map(torch.from_numpy, (user, ids[product], probability, label)))
            )

    def batches(self, day: int, batch_size: int) -> Iterator[Batch]:
        """Batches of B visits of a day, in order: ids 'user' and 'item', labels [B], no dense."""
        user, item, _, label = self._visits[day]
        for columns in zip(
            *(column.split(batch_size) for column in (user, item, label)), strict=True
        ):
            count = len(columns[2])
            features = KeyedJaggedTensor(
                ["user", "item"],
                torch.cat(columns[:2]),
                lengths=torch.ones(2 * count, dtype=torch.int32),
            )
            yield Batch(torch.empty(count, 0), features, columns[2])

    def labels(self, day: int) -> Tensor:
        """1.0 for a click, of each visit of a day [visits]."""
        return self._visits[day][3]

    def best_auc(self, day: int) -> float:
        """AUC of the planted probabilities of a day: what a model reaches that knows everything."""
        return auc(self._visits[day][3], self._visits[day][2])
