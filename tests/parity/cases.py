"""What both libraries compute: `python tests/parity/cases.py tutorec` prints the results of every
case as JSON.
"""

from __future__ import annotations

import os
import sys
import tempfile
import warnings
from typing import Any

import jagged_cases  # noqa: F401  its cases enter the registry
import metric_cases  # noqa: F401
import model_cases  # noqa: F401
import module_cases  # noqa: F401
import optimizer_cases  # noqa: F401
import quant_cases  # noqa: F401
import sharded_cases  # noqa: F401
from registry import CASES, print_and_end


def results(root: str) -> dict[str, Any]:
    """The results of every case, or the error's text under `error`."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/rendezvous", rank=0, world_size=1
        )
        found = {}
        for name, run in CASES.items():
            try:
                found[name] = run(root)
            except Exception as error:
                found[name] = {"error": f"{type(error).__name__}: {error}"}
        dist.destroy_process_group()
    return found


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    os.environ.setdefault("LOCAL_WORLD_SIZE", "1")
    print_and_end(results(sys.argv[1]))
