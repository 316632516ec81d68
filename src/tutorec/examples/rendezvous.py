"""The meeting point of torchrun's agents on a separate machine, which outlives every host.

With ``--rdzv-backend=c10d`` the agents of all hosts meet in a store that one of them opens. When
that host dies the run dies with it, whatever ``--max-restarts`` says. Opened here, on a login node
for example, the store loses no host::

    on login node:  python -m tutorec.examples.rendezvous --port 29400
    on every host:  torchrun --nnodes 1:2 --rdzv-endpoint LOGIN:29400 --rdzv-conf is_host=false ...

It serves one run after another, each under an ``--rdzv-id`` of its own, until it is stopped.
Whoever reaches the port can take part in the run: leave it open to the hosts of the run only.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence

from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]


def main(argv: Sequence[str] | None = None) -> int:
    """Open the store and keep it until SIGTERM or an interrupt.

    Args:
        argv: The options; by default those of the command line.

    Returns:
        The exit status, 0.
    """
    parser = argparse.ArgumentParser(
        prog="python -m tutorec.examples.rendezvous", description=__doc__
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "--address", default="0.0.0.0", help="of this machine, as hosts reach it (all: %(default)s)"
    )
    parser.add_argument("--port", type=int, default=29400, help="%(default)s; 0 takes a free one")
    options = parser.parse_args(argv)
    # Blocked before the store starts its threads, so that none of them takes the signal.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    store = TCPStore(options.address, options.port, is_master=True, wait_for_workers=False)
    print(f"agents meet at {options.address}:{store.port}", flush=True)
    signal.sigwait({signal.SIGTERM, signal.SIGINT})

    return 0


if __name__ == "__main__":
    sys.exit(main())
