"""The sliders of the page on choosing compute what the library computes, and what the tests' own
byte formulas say.
"""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
import sys
from dataclasses import asdict, replace
from functools import cache

import pytest
import torch
from distributed.byte_formulas import StepBatches, step_traffic
from policy.tree import ROOT

sys.path.insert(0, str(ROOT / "book/_ext"))
import cuts

from tutorec.distributed.core.tables import SharderSupport, place_table
from tutorec.distributed.plan.geometry import TableShard, parameter_sharding
from tutorec.distributed.plan.plan import EmbeddingComputeKernel, ShardingType
from tutorec.distributed.plan.sizes import cut_arrays, slice_width
from tutorec.modules.embedding_configs import EmbeddingBagConfig

NODE = shutil.which("node")
SCRIPT = ROOT / "book/_static/cuts.js"
MOST_BYTES = 10_000
CASES = [
    cuts.Case(*case)
    for case in itertools.product(
        ("H100", "laptop"),
        (2, 8, 64),
        (1, 2, 8),
        (16, 4096),
        (1, 50),
        (1000, 10_000_000, 5_000_000_000),
        (4, 32, 256),
    )
    if case[2] <= case[1]
] + [cuts.Case("A100-80", 512, 64, 16384, 1000, 200, 1024)]


@cache
def of_the_script() -> list[list[dict[str, float | str]]]:
    """What the script computes for all cases."""
    words = f"const {{costs}} = require({json.dumps(str(SCRIPT))});"
    words += "console.log(JSON.stringify(JSON.parse(require('fs').readFileSync(0)).map(costs)))"
    command = [str(NODE), "-e", words]
    given = json.dumps([asdict(case) for case in CASES])
    return json.loads(
        subprocess.run(
            command, input=given, capture_output=True, text=True, check=True, timeout=60
        ).stdout
    )


@pytest.mark.slow
@pytest.mark.skipif(NODE is None, reason="needs node, which runs the page's script")
def test_the_script_computes_what_the_library_computes():
    for case, lines in zip(CASES, of_the_script(), strict=True):
        assert [line.pop("cut") for line in lines] == list(cuts.CUTS)
        for cut, line in zip(cuts.CUTS, lines, strict=True):
            wanted = asdict(cuts.cost(cut, case))
            del wanted["cut"]
            assert line == pytest.approx(wanted, rel=1e-9), (cut, case)


@pytest.mark.skipif(NODE is None, reason="needs node, which runs the page's script")
def test_the_script_starts_with_what_the_page_shows():
    words = f"const {{START, HEADER}} = require({json.dumps(str(SCRIPT))});"
    words += "console.log(JSON.stringify([START, HEADER]))"
    done = subprocess.run(
        [str(NODE), "-e", words], capture_output=True, text=True, check=True, timeout=60
    )
    assert json.loads(done.stdout) == [asdict(cuts.START), list(cuts.HEADER)]


def traffic(cut: str, case: cuts.Case) -> tuple[float, float]:
    """Bytes of a step, all and between hosts, by the tests' formulas, without sizes, which the
    library neglects.
    """
    kind, local = cuts.CUTS[cut], case.ranks // case.hosts
    width = slice_width(case.columns, cuts.LEAST_COLUMNS)
    sizes, offsets = cut_arrays(kind, (case.rows, case.columns), case.ranks, local, width)
    places = zip(
        cuts.ranks_of(kind, len(sizes), case).tolist(),
        sizes.tolist(),
        offsets.tolist(),
        strict=True,
    )
    pieces = [
        TableShard(rank, row, column, rows, columns)
        for rank, (rows, columns), (row, column) in places
    ]
    config = EmbeddingBagConfig(case.rows, case.columns, "t", feature_names=["f"])
    entry = parameter_sharding(kind, pieces, "cpu")
    rules = SharderSupport(
        case.ranks, False, list(ShardingType), list(EmbeddingComputeKernel), None, local
    )
    table = place_table(
        config, ["f"], torch.empty(case.rows, case.columns, device="meta"), entry, rules
    )
    ids = case.batch * case.bag
    batches = StepBatches(
        [{"f": case.batch}] * case.ranks,
        ids=lambda rank, feature, first, end: ids * (end - first) / case.rows,  # type: ignore[arg-type, return-value]
    )
    sent = {
        key: count
        for key, count in step_traffic([table], batches, local).items()
        if "sizes" not in key[0]
    }
    return sum(sent.values()), sum(
        count for (_, a, b), count in sent.items() if a // local != b // local
    )


@pytest.mark.parametrize("cut", cuts.CUTS)
@pytest.mark.parametrize("hosts", [1, 2, 4])
@pytest.mark.parametrize("rows", [64, 1 << 20])
def test_its_bytes_are_those_of_the_formulas_that_share_no_code_with_it(cut, hosts, rows):
    case = cuts.Case("H100", 8, hosts, batch=32, bag=4, rows=rows, columns=64)
    found = cuts.cost(cut, case)
    assert (found.bytes, found.across) == pytest.approx(traffic(cut, case))


def test_the_page_shows_the_numbers_it_starts_with():
    text, least = (
        cuts.page(),
        min((cuts.cost(cut, cuts.START) for cut in cuts.CUTS), key=lambda each: each.ms),
    )
    assert text.count("<tr>") == 1 + len(cuts.CUTS)
    assert f'<span class="least">{least.ms:.3g} ms</span>' in text
    assert cuts.size(0.0) == "0 B" and cuts.size(25.6e9) == "25.6 GB"
    assert cuts.page(replace(cuts.START, hosts=1)).count("0 B") == 0


def test_the_script_is_small():
    assert SCRIPT.stat().st_size <= MOST_BYTES
