"""Step 3: the rows of all days but the last, shuffled; arguments of TorchRec's script of that name.

``python -m tutorec.datasets.scripts.shuffle_preproc_criteo --input_dir_labels_and_dense DIR
--input_dir_sparse DIR --output_dir_shuffled DIR``
"""

from __future__ import annotations

import argparse
import sys

from tutorec.datasets.criteo import DAYS, BinaryCriteoUtils


def main(argv: list[str]) -> None:
    """Write the arrays of day_0 to day_22 in another order, and copy those of day_23."""
    parser = argparse.ArgumentParser(description="Shuffle the rows of Criteo's arrays.")
    parser.add_argument(
        "--input_dir_labels_and_dense",
        required=True,
        help="folder of day_0_labels.npy, day_0_dense.npy",
    )
    parser.add_argument(
        "--input_dir_sparse", required=True, help="folder of day_0_sparse.npy to day_23_sparse.npy"
    )
    parser.add_argument(
        "--output_dir_full_set", help="folder for full.npy, all rows before the shuffle"
    )
    parser.add_argument(
        "--output_dir_shuffled", required=True, help="folder for the shuffled arrays"
    )
    parser.add_argument("--random_seed", type=int, default=0)
    args = vars(parser.parse_args(argv))

    labels = args["input_dir_labels_and_dense"]
    rows = {
        day: BinaryCriteoUtils.get_shape_from_npy(f"{labels}/day_{day}_labels.npy")[0]
        for day in range(DAYS - 1)
    }
    BinaryCriteoUtils.shuffle(rows_per_day=rows, **args)
    print(f"{sum(rows.values()):,} rows shuffled in {args['output_dir_shuffled']}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
