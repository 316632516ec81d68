"""The API pages list modules that exist, once each, and show what these define."""

from __future__ import annotations

import importlib
import sys
from collections import Counter

from policy.tree import ROOT, assert_none

sys.path.insert(0, str(ROOT / "book/_ext"))
import api_pages

LISTED = {
    path.stem: api_pages.listed(path.read_text(encoding="utf-8"))
    for path in (ROOT / "book/api").glob("*.md")
}


def test_every_module_is_listed_once():
    counts = Counter(module for modules in LISTED.values() for module in modules)
    assert len(counts) > 150
    assert_none([module for module, count in counts.items() if count > 1])


def test_every_listed_name_is_documented():
    missing = []
    for modules in LISTED.values():
        for module, names in modules.items():
            shown = api_pages.members(importlib.import_module(module), names)
            missing += [
                f"{module}.{name}"
                for name, thing in shown.items()
                if not api_pages.first_sentence(thing)
            ]
    assert_none(missing)


def test_a_page_has_a_line_for_each_name_and_the_docstrings():
    public = {"tutorec.distributed.types.ShardingEnv"}
    text = api_pages.page("tutorec.distributed.core.env", [], "distributed", public)
    assert "`ShardingEnv` as `tutorec.distributed.types.ShardingEnv`" in text
    assert "| {py:obj}`~tutorec.distributed.core.env.ShardingEnv` | " in text
    assert ".. automodule:: tutorec.distributed.core.env\n   :members:\n" in text
    assert "`~tutorec.distributed.core.env.ShardingEnv`" not in api_pages.page(
        "tutorec.distributed.core.env", ["sharding_groups"], "x", public
    )


def test_a_page_says_which_of_its_names_are_public():
    def sentence(*public: str) -> str:
        module = importlib.import_module("tutorec.sparse.equality")
        shown = api_pages.members(module, ["jt_is_equal", "kt_is_equal"])
        return api_pages.public_sentence("tutorec.sparse.equality", shown, set(public))

    here = "tutorec.sparse.equality"
    assert sentence().startswith("No name")
    assert sentence(f"{here}.jt_is_equal", f"{here}.kt_is_equal").startswith("All names")
    mixed = sentence("tutorec.sparse.jagged_tensor.jt_is_equal")
    assert "`jt_is_equal` as `tutorec.sparse.jagged_tensor.jt_is_equal`. The other" in mixed


def test_blocks_are_read_with_their_members():
    text = "a\n```{api-modules}\na.b\nc.d: E, f\n```\n```{api-modules}\ng\n```\n"
    assert api_pages.listed(text) == {"a.b": [], "c.d": ["E", "f"], "g": []}


def test_the_first_sentence_ends_at_a_full_stop_and_not_at_a_dot():
    def documented() -> None:
        """Bytes of `a.b`, e.g. of
        a row. More.

        Else.
        """

    assert api_pages.first_sentence(documented) == "Bytes of `a.b`, e.g. of a row."
