"""Step 1: Criteo's text files as arrays of numpy; arguments of TorchRec's script of that name.

``python -m tutorec.datasets.scripts.npy_preproc_criteo --input_dir DIR --output_dir DIR``
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tutorec.datasets.criteo import DAYS, BinaryCriteoUtils


def main(argv: list[str]) -> None:
    """Write the arrays of every file that is there."""
    parser = argparse.ArgumentParser(description="Write Criteo's text files as arrays of numpy.")
    parser.add_argument(
        "--input_dir", required=True, help="folder of day_0 to day_23, or of train.txt and test.txt"
    )
    parser.add_argument("--output_dir", required=True, help="folder for the arrays")
    parser.add_argument(
        "--dataset_name", choices=["criteo_1tb", "criteo_kaggle"], default="criteo_1tb"
    )
    args = parser.parse_args(argv)
    kaggle = args.dataset_name == "criteo_kaggle"

    for name in ["train.txt", "test.txt"] if kaggle else [f"day_{day}" for day in range(DAYS)]:
        source = Path(args.input_dir) / name
        if source.exists():
            outputs = [
                f"{args.output_dir}/{source.stem}_{array_name}.npy"
                for array_name in ("dense", "sparse", "labels")
            ]
            BinaryCriteoUtils.tsv_to_npys(str(source), *outputs, dataset_name=args.dataset_name)
            print(f"{source}: {', '.join(outputs)}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
