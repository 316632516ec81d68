"""A format for each table under a budget: the least error there is, which trying everything
confirms.
"""

from __future__ import annotations

from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import tutorec
from tutorec.modules.embedding_collection import EmbeddingCollection
from tutorec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from tutorec.modules.embedding_modules import EmbeddingBagCollection
from tutorec.quant.choosing import MenuEntry, cheapest_within, choose_dtypes, table_menu

entries = st.builds(
    MenuEntry,
    st.sampled_from([torch.int8, torch.float16]),
    st.integers(1, 30),
    st.one_of(st.integers(0, 40).map(float), st.floats(0, 1e-3)),
)
menus = st.lists(st.lists(entries, min_size=1, max_size=5), min_size=0, max_size=6)


@given(menus=menus, budget=st.integers(0, 150))
def test_the_choice_is_the_best_of_all(menus, budget):
    named = {f"t{index}": menu for index, menu in enumerate(menus)}
    fitting = [
        choice for choice in product(*menus) if sum(entry.bytes for entry in choice) <= budget
    ]
    if not fitting:
        with pytest.raises(ValueError, match=r"at least .* bytes.* budget is"):
            cheapest_within(named, budget)
        return
    chosen = cheapest_within(named, budget)
    assert list(chosen) == list(named)
    assert all(entry in named[name] for name, entry in chosen.items())
    assert sum(entry.bytes for entry in chosen.values()) <= budget
    least = min(sum(entry.error for entry in choice) for choice in fitting)
    assert sum(entry.error for entry in chosen.values()) == pytest.approx(
        least, rel=2e-6, abs=1e-10
    )


def test_the_best_choice_may_leave_a_better_bargain_out():
    """By error saved per byte a comes first, and then nothing is left for b, which saves more."""
    a = [MenuEntry(torch.int8, 0, 10.0), MenuEntry(torch.float16, 6, 3.0)]
    b = [MenuEntry(torch.int8, 0, 20.0), MenuEntry(torch.float16, 10, 10.0)]
    assert [entry.bytes for entry in cheapest_within({"a": a, "b": b}, 10).values()] == [0, 10]


def test_a_step_that_only_a_later_one_pays_for_is_not_skipped():
    """From 0 bytes the way to 6 pays, and goes past 5, which is all that the budget allows."""
    menu = [
        MenuEntry(torch.int8, 0, 10.0),
        MenuEntry(torch.float16, 5, 9.0),
        MenuEntry(torch.float32, 6, 0.0),
    ]
    assert [cheapest_within({"a": menu}, budget)["a"].bytes for budget in (4, 5, 6)] == [0, 5, 6]
    assert sorted(
        entry.bytes for entry in cheapest_within({"a": menu, "b": menu}, 11).values()
    ) == [5, 6]
    assert sorted(
        entry.bytes for entry in cheapest_within({"a": menu, "b": menu}, 10).values()
    ) == [0, 6]


def test_many_tables_are_chosen_for_exactly():
    """60 tables: the answer lies between the continuous form's bound and a choice that is known to
    be good.
    """
    generator = torch.Generator().manual_seed(5)
    named = {}
    for index in range(60):
        rows = int(torch.randint(10, 1_000_000, (1,), generator=generator))
        size = float(torch.rand(1, generator=generator)) + 0.01
        kinds = zip((32, 48, 80, 128), (1 / 9, 1 / 225, 1 / 65025, 1e-8), strict=True)
        named[f"t{index}"] = [
            MenuEntry(torch.int8, rows * width, size * error) for width, error in kinds
        ]
    for share in (0.3, 0.5, 0.9):
        low, high = (sum(menu[place].bytes for menu in named.values()) for place in (0, -1))
        budget = int(low + share * (high - low))
        chosen = cheapest_within(named, budget)
        used = sum(entry.bytes for entry in chosen.values())
        assert used <= budget
        # Nothing is gained by exchanging the formats of any two tables.
        names = list(named)
        for first in names[:10]:
            for second in names:
                if first == second:
                    continue
                rest = used - chosen[first].bytes - chosen[second].bytes
                now = chosen[first].error + chosen[second].error
                for one, other in product(named[first], named[second]):
                    assert (
                        rest + one.bytes + other.bytes > budget
                        or one.error + other.error >= now * (1 - 2e-6)
                    )


def collection(**rows: int) -> EmbeddingBagCollection:
    return EmbeddingBagCollection(
        [EmbeddingBagConfig(count, 64, name) for name, count in rows.items()]
    )


def test_the_menu_tells_bytes_and_measured_errors():
    ebc = collection(a=50)
    for entry in table_menu(ebc)["a"]:
        packed = tutorec.quantize(ebc, entry.dtype)
        assert packed.embedding_bags["a"].weight.numel() == entry.bytes
        read = tutorec.quant.unpack_rows(
            packed.packed_rows("a"), 64, packed.packed_table("a").data_type
        )
        expected = (ebc.embedding_bags["a"].weight - read).square().sum(1).mean().item()
        assert entry.error == pytest.approx(expected, rel=1e-5)
    wide = {
        entry.dtype: entry.bytes
        for entry in table_menu(ebc, [torch.quint4x2], row_alignment=64)["a"]
    }
    assert wide == {torch.quint4x2: 50 * 64}


def test_the_choice_is_what_quantize_takes():
    model = nn.ModuleDict(
        {"x": collection(a=100, b=200), "y": EmbeddingCollection([EmbeddingConfig(300, 64, "a")])}
    )
    chosen = choose_dtypes(model, 40_000)
    assert set(chosen) == {"x.a", "b", "y.a"}
    quantized = tutorec.quantize(model, per_table=chosen)
    used = sum(part.numel() for part in quantized.buffers())
    assert used <= 40_000
    assert used > 40_000 - 300 * 32
    everything = choose_dtypes(model, 10**9)
    assert set(everything.values()) == {torch.float16}


def test_tables_that_are_looked_up_more_get_more_bits():
    model = collection(a=100, b=100)
    with torch.no_grad():
        model.embedding_bags["b"].weight.copy_(model.embedding_bags["a"].weight)
    budget = 100 * (64 + 68)
    assert choose_dtypes(model, budget, lookups={"a": 9.0}) == {
        "a": torch.int8,
        "b": torch.quint4x2,
    }
    assert choose_dtypes(model, budget, lookups={"b": 9.0}) == {
        "a": torch.quint4x2,
        "b": torch.int8,
    }


def test_errors_of_large_tables_are_those_of_some_rows():
    model = collection(a=2000)
    whole, some = (table_menu(model, sample_rows=rows)["a"] for rows in (10**6, 500))
    for one, other in zip(whole, some, strict=True):
        assert one.bytes == other.bytes
        assert one.error == pytest.approx(other.error, rel=0.05)


@pytest.mark.parametrize(
    ("call", "kind", "words"),
    [
        (
            lambda: choose_dtypes(collection(a=10), 300),
            ValueError,
            r"at least 320 bytes, and the budget is 300: {'a': 320}",
        ),
        (
            lambda: choose_dtypes(collection(a=10), 900, lookups={"x": 1.0}),
            KeyError,
            r"no tables \['x'\].*\['a'\]",
        ),
        (
            lambda: choose_dtypes(collection(a=10), 900, lookups={"a": -1.0}),
            ValueError,
            "lookups of table 'a'=-1.0 must be a finite number",
        ),
        (
            lambda: choose_dtypes(collection(a=10), 900, lookups={"a": float("nan")}),
            ValueError,
            "lookups of table",
        ),
        (lambda: choose_dtypes(collection(a=10), 900, dtypes=[]), ValueError, "dtypes is empty"),
        (
            lambda: choose_dtypes(collection(a=10), 900, dtypes=[torch.int64]),
            ValueError,
            "'a' cannot be quantized to",
        ),
        (
            lambda: choose_dtypes(collection(a=10).to("meta"), 900),
            ValueError,
            "meta device has no values",
        ),
        (
            lambda: choose_dtypes(collection(a=10), float("nan")),
            ValueError,
            "budget_bytes=nan must be a finite",
        ),
        (lambda: choose_dtypes(nn.Linear(2, 2), 900), ValueError, "nothing to quantize"),
        (
            lambda: choose_dtypes(tutorec.quantize(collection(a=10)), 900),
            ValueError,
            "already quantized",
        ),
    ],
)
def test_what_cannot_be_chosen_is_refused(call, kind, words):
    with pytest.raises(kind, match=words):
        call()
