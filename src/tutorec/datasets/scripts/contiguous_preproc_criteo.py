"""Step 2: the ids of all days as contiguous ones; arguments of TorchRec's script of that name.

``python -m tutorec.datasets.scripts.contiguous_preproc_criteo --input_dir DIR --output_dir DIR``
"""

from __future__ import annotations

import argparse
import sys

from tutorec.datasets.criteo import DAYS, BinaryCriteoUtils


def main(argv: list[str]) -> None:
    """Write day_0_sparse_contig_freq.npy to day_23_sparse_contig_freq.npy."""
    parser = argparse.ArgumentParser(
        description="Give the ids of Criteo's arrays contiguous numbers."
    )
    parser.add_argument(
        "--input_dir", required=True, help="folder of day_0_sparse.npy to day_23_sparse.npy"
    )
    parser.add_argument("--output_dir", required=True, help="folder for the arrays")
    parser.add_argument(
        "--frequency_threshold", type=int, default=0, help="ids that occur less often become 1"
    )
    args = parser.parse_args(argv)

    files = [f"{args.input_dir}/day_{day}_sparse.npy" for day in range(DAYS)]
    BinaryCriteoUtils.sparse_to_contiguous(files, args.output_dir, args.frequency_threshold)
    print(f"{len(files)} files of contiguous ids in {args.output_dir}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
