"""Measure both libraries and store the ratios that chapter 20 shows; run by `make ratios`, after
`make parity`.

Every row is a case of `python -m benchmarks NAME --vs torchrec`, which compares the results
before it times anything. tutorec's checks are on wherever a benchmark measures both.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
FOR_THE_BOOK = ROOT / "src/tutorec/teach/data/ratios.json"
ROUNDS = 30
# New processes of both libraries: slow, and nearly the same every time.
IMPORT_ROUNDS = 5
# benchmark, its options, and its rows: title of a comparison, what the chapter calls it, what it
# was measured on
RUNS: tuple[tuple[str, tuple[str, ...], dict[str, tuple[str, str]]], ...] = (
    (
        "kjt",
        ("--sizes", "mid", "--cases", "construct,split,permute,to_dict,regroup"),
        {
            "mid construct: torchrec / tutorec checked": (
                "a jagged batch, built",
                "26 features, B = 1,024",
            ),
            "mid split: torchrec / tutorec checked": (
                "a jagged batch, split",
                "26 features, B = 1,024",
            ),
            "mid permute: torchrec / tutorec checked": (
                "a jagged batch, permuted",
                "26 features, B = 1,024",
            ),
            "mid to_dict: torchrec / tutorec checked": (
                "a jagged batch, to_dict",
                "26 features, B = 1,024",
            ),
        },
    ),
    (
        "ebc",
        ("--cases", "forward-256,step-rowwise_adagrad"),
        {
            "forward-256: torchrec / tutorec checked": ("forward, unsharded", "26 tables, B = 256"),
            "step-rowwise_adagrad: torchrec fused / tutorec checked": (
                "training step, unsharded, fused",
                "26 tables, B = 256",
            ),
        },
    ),
    (
        "sharded",
        (
            "--world",
            "2",
            "--cases",
            "step-table_wise,step-row_wise,step-column_wise,step-data_parallel-sgd",
        ),
        {
            f"step-{kind}: torchrec / tutorec": (
                f"training step, {kind.removesuffix('-sgd')}",
                "two ranks",
            )
            for kind in ("table_wise", "row_wise", "column_wise", "data_parallel-sgd")
        },
    ),
    (
        "train",
        ("--world", "2", "--cases", "dlrm"),
        {"dlrm: torchrec / tutorec": ("training step of a DLRM", "two ranks")},
    ),
    (
        "quant",
        ("--cases", "int8-1,int8-512"),
        {
            "int8-1: torchrec / tutorec checked": (
                "int8 lookup, one request",
                "26 tables, B = 1",
            ),
            "int8-512: torchrec / tutorec checked": (
                "int8 lookup, a batch",
                "26 tables, B = 512",
            ),
        },
    ),
    (
        "import",
        ("--rounds", str(IMPORT_ROUNDS)),
        {
            "torchrec, first forward / tutorec, first forward": (
                "import, first lookup",
                "a new process",
            )
        },
    ),
)


def measured(name: str, options: tuple[str, ...], rounds: int) -> dict[str, Any]:
    """The JSON of one benchmark; a bar that is missed is no reason to stop."""
    if "--rounds" not in options:
        options = (*options, "--rounds", str(rounds))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "report.json")
        words = [sys.executable, "-m", "benchmarks", name, "--vs", "torchrec", *options]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        done = subprocess.run(
            [*words, "--json", str(path)],
            env=environment,
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        if not path.exists():
            raise SystemExit(
                f"bench {name} ended with {done.returncode}; nothing was "
                f"written:\n{done.stderr[-3000:]}"
            )
        return json.loads(path.read_text(encoding="utf-8"))


def rows_of(report: dict[str, Any], wanted: dict[str, tuple[str, str]]) -> list[dict[str, Any]]:
    """The comparisons by CPU time that the chapter shows, in its words."""
    by_title = {c["title"]: c for c in report["comparisons"] if c["clock"] == "cpu"}
    if absent := wanted.keys() - by_title.keys():
        raise SystemExit(
            f"bench {report['benchmark']} has no {sorted(absent)}; it has {sorted(by_title)}"
        )
    return [
        {
            "what": what,
            "where": where,
            "benchmark": report["benchmark"],
            "seconds": dict(zip(("torchrec", "tutorec"), by_title[title]["medians"], strict=True)),
            **by_title[title]["ratio"],
        }
        for title, (what, where) in wanted.items()
    ]


def main(rounds: int = ROUNDS) -> None:
    rows: list[dict[str, Any]] = []
    context: dict[str, Any] = {}
    for name, options, wanted in RUNS:
        begun = time.monotonic()
        report = measured(name, options, rounds)
        context = context or {key: report[key] for key in ("date", "versions", "hardware")}
        rows += rows_of(report, wanted)
        print(f"bench {name}: {time.monotonic() - begun:.0f} s", flush=True)
    context["versions"] |= {"torchrec": importlib.metadata.version("torchrec")}
    FOR_THE_BOOK.write_text(
        json.dumps({**context, "rows": rows}, indent=1) + "\n", encoding="utf-8"
    )
    for row in rows:
        print(
            f"{row['what']:40} {row['median']:.2f} [{row['low']:.2f}, {row['high']:.2f}], "
            f"{row['rounds']} rounds"
        )


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]))
