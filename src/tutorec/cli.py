"""The command ``tutorec``: doctor, plan, calibrate, migrate.

``python -m tutorec`` is the same command, for a Python whose scripts are not on the path.
"""

from __future__ import annotations

import argparse
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tutorec.distributed.planner.planners import EmbeddingShardingPlanner
    from tutorec.table_files import TableFile

__all__ = ["main"]

_TICK_SECONDS = 0.25  # between updates of the clock while planning

_PLAN_EXAMPLE = """\
tables.yaml lists tables by the names of EmbeddingBagConfig's and ParameterConstraints' fields:

  batch_size: 512                     # samples per rank; only the tables are required
  fused_params: {optimizer: exact_row_wise_adagrad, learning_rate: 0.02}
  tables:
    - name: item
      num_embeddings: 100_000_000     # or 1e8
      embedding_dim: 64
      feature_names: [item, seen]     # [item] by default
      pooling_factors: [1, 20]        # mean ids per bag, for each feature
    - name: user
      num_embeddings: 5_000_000
      embedding_dim: 128
      sharding_types: [table_wise, column_wise]
      min_partition: 32

examples:
  tutorec plan tables.yaml --topology 8xH100x16
  tutorec plan tables.yaml --topology 8xH100 --optimal --out plan.json --plot plan.svg
  tutorec plan tables.yaml --topology laptop --explain item
"""
# Exit statuses.
_FAILED = 1
_MISUSED = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: The arguments after ``tutorec``; None takes them from the command line.

    Returns:
        The exit status: 0; 1 if the doctor finds something broken, no plan fits, or code does not
        migrate as it is; 2 if an argument or a file is invalid.

    Example:
        >>> import contextlib, io
        >>> from tutorec.cli import main
        >>> with contextlib.redirect_stdout(io.StringIO()):
        ...     status = main(["doctor"])
        >>> status in (0, 1)
        True
    """
    arguments = _parser().parse_args(argv)
    if arguments.command == "plan":
        return _plan(arguments)
    if arguments.command == "calibrate":
        return _calibrate()
    if arguments.command == "migrate":
        return _migrate(arguments)

    from tutorec._doctor import doctor

    return 1 if doctor(json=arguments.json).broken else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tutorec", description="Distributed embeddings that run anywhere."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")

    doctor = commands.add_parser(
        "doctor", help="what runs on this machine, why, and what would improve it"
    )
    doctor.add_argument(
        "--json", action="store_true", help="print the report as JSON, for programs"
    )

    plan = commands.add_parser(
        "plan",
        help="how to shard tables over machines that need not exist",
        description="Plan how the tables of a file are sharded, and say why. No device is needed.",
        epilog=_PLAN_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    plan.add_argument("tables", help="a YAML file, see below")
    plan.add_argument(
        "--topology",
        required=True,
        metavar="NAME",
        help=(
            "ranks per host, kind and hosts: 8xH100x16; kinds are A100-40, A100-80, H100, H200 "
            "and laptop"
        ),
    )
    plan.add_argument(
        "--batch-size", type=int, metavar="B", help="samples of a rank's batch (the file's, or 512)"
    )
    plan.add_argument(
        "--optimal", action="store_true", help="prove how good the plan is, with HiGHS"
    )
    plan.add_argument(
        "--time-limit", type=float, metavar="SECONDS", help="when to stop searching (--optimal: 30)"
    )
    plan.add_argument("--out", metavar="PLAN.json", help="save the plan, for ShardingPlan.load")
    plan.add_argument(
        "--plot", metavar="PLAN.svg", help="draw memory and time of each rank (.svg, .png, .pdf)"
    )
    plan.add_argument("--explain", metavar="TABLE", help="why this table is sharded as it is")

    commands.add_parser(
        "calibrate",
        help=(
            "measure this machine for the planner, in some seconds, and keep the result for this "
            "user"
        ),
        description="Measure this machine for the planner. Close other programs first.",
    )

    migrate = commands.add_parser(
        "migrate",
        help="what of a project's code that uses TorchRec runs here, and the renaming",
        description="Read Python files and notebooks (not configurations, scripts or prose): which "
        "names and arguments "
        "of TorchRec are here, which are not and what to use instead. Ends with 1 where something "
        "has to be changed by hand.",
    )
    migrate.add_argument("path", metavar="PATH", help="a Python file, a notebook, or a folder")
    migrate.add_argument(
        "--write", action="store_true", help="rename the package in imports, names and import paths"
    )
    migrate.add_argument(
        "--json", action="store_true", help="print the report as JSON, for programs"
    )
    migrate.add_argument(
        "--to", choices=["tutorec", "torchrec"], default="tutorec", help="the other way: torchrec"
    )

    return parser


def _plan(arguments: argparse.Namespace) -> int:
    """``tutorec plan``."""
    from tutorec.errors import PlannerError, PlannerErrorType

    try:
        with _warnings_as_lines():
            _write_plan(arguments)
    except (OSError, ValueError, KeyError) as error:
        # str() of a KeyError is the repr of its text.
        text = error.args[0] if isinstance(error, KeyError) else error
        print(f"tutorec plan: {text}", file=sys.stderr)
        misused = (
            not isinstance(error, PlannerError)
            or error.error_type is PlannerErrorType.INPUT_VALIDATION
        )
        return _MISUSED if misused else _FAILED
    return 0


def _calibrate() -> int:
    """``tutorec calibrate``."""
    from tutorec._calibration import require_place
    from tutorec.distributed.calibration import calibrate, speeds_text
    from tutorec.distributed.planner.topology import Topology

    try:
        require_place()
    except OSError as error:
        print(f"tutorec calibrate: {error}", file=sys.stderr)
        return _MISUSED

    calibration = calibrate()
    for device in calibration.speeds:
        print(f"{device}: {speeds_text(Topology.calibrated(calibration, 2, device))}")
    print(
        f"kept in {calibration.keep()}; the default planner of DistributedModelParallel uses "
        "it on this machine"
    )
    return 0


def _migrate(arguments: argparse.Namespace) -> int:
    """``tutorec migrate``."""
    from tutorec._migrate import migrate
    from tutorec._text import visible

    try:
        report = migrate(Path(arguments.path), to=arguments.to, write=arguments.write)
    except (OSError, ValueError) as error:
        print(f"tutorec migrate: {visible(str(error))}", file=sys.stderr)
        return _MISUSED

    print(report.as_json() if arguments.json else report)
    return 0 if report.complete else _FAILED


def _write_plan(arguments: argparse.Namespace) -> None:
    """Plan, then print, save and draw."""
    from tutorec.table_files import load_tables

    # A search may take a minute, so arguments are checked first.
    for path in (arguments.out, arguments.plot):
        if path is not None and Path(path).is_dir():
            raise IsADirectoryError(
                f"{path} is a folder: write the name of a file, {Path(path) / 'plan'}..."
            )
        if path is not None and not Path(path).absolute().parent.is_dir():
            raise FileNotFoundError(
                f"{path}: there is no folder {Path(path).absolute().parent}; make it first"
            )
    if arguments.plot is not None and Path(arguments.plot).suffix not in (".svg", ".png", ".pdf"):
        raise ValueError(f"--plot {arguments.plot}: write a name that ends in .svg, .png or .pdf")
    if arguments.time_limit is not None and not arguments.time_limit > 0:
        raise ValueError(f"--time-limit {arguments.time_limit}: give a positive number of seconds")

    file = load_tables(arguments.tables)
    _check_explained(arguments.explain, sorted(file.constraints))
    planner = _planner(arguments, file)

    with _bar_while_planning():
        plan = planner.plan(file.model, _sharders(arguments.tables, file))

    print(plan.explain())
    if arguments.explain is not None:
        print(f"\n{plan.explain(arguments.explain)}")
    if arguments.out is not None:
        plan.save(arguments.out)
        print(f"\nsaved in {arguments.out}: ShardingPlan.load({arguments.out!r}) reads it")
    if arguments.plot is not None:
        plan.plot().savefig(arguments.plot)
        print(f"\ndrawn in {arguments.plot}")


def _check_explained(table: str | None, names: Sequence[str]) -> None:
    """Raise ValueError if the file does not have the table that is to be explained."""
    from tutorec._check import did_you_mean

    if table is not None and table.rpartition(".")[2] not in names:
        hint = did_you_mean(table, names) or f"; the file has {', '.join(map(repr, names[:5]))}"
        raise ValueError(f"--explain {table}: there is no table {table!r}{hint}")


def _planner(arguments: argparse.Namespace, file: TableFile) -> EmbeddingShardingPlanner:
    from tutorec.distributed.planner.planners import EmbeddingShardingPlanner, OptimalPlanner
    from tutorec.distributed.planner.topology import Topology

    topology = Topology.preset(arguments.topology)
    batch_size = arguments.batch_size if arguments.batch_size is not None else file.batch_size
    if arguments.optimal:
        limit = {} if arguments.time_limit is None else {"time_limit": arguments.time_limit}
        return OptimalPlanner(topology, batch_size, file.constraints, **limit)

    return EmbeddingShardingPlanner(
        topology, batch_size, constraints=file.constraints, timeout_seconds=arguments.time_limit
    )


def _sharders(source: str, file: TableFile) -> list[Any]:
    """The sharders of both collections, with the file's optimizer."""
    from tutorec.distributed.embedding import EmbeddingCollectionSharder
    from tutorec.distributed.embeddingbag import EmbeddingBagCollectionSharder

    try:
        return [
            EmbeddingBagCollectionSharder(file.fused_params),
            EmbeddingCollectionSharder(file.fused_params),
        ]
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from None


@contextmanager
def _bar_while_planning() -> Iterator[None]:
    """Show the seconds of planning on a terminal, from the third second on."""
    from tqdm import tqdm

    planned = threading.Event()

    # disable=None hides it if standard error is not a terminal
    with tqdm(
        desc="planning", bar_format="{desc}: {elapsed}", delay=2.0, leave=False, disable=None
    ) as bar:

        def tick() -> None:
            while not planned.wait(_TICK_SECONDS):
                bar.update()

        ticking = threading.Thread(target=tick, daemon=True)
        ticking.start()
        try:
            yield
        finally:
            planned.set()
            ticking.join()


@contextmanager
def _warnings_as_lines() -> Iterator[None]:
    """Print warnings of the planner as lines, without file and line number."""
    with warnings.catch_warnings():
        warnings.simplefilter("always", UserWarning)
        warnings.showwarning = lambda message, *_, **__: print(
            f"tutorec plan: {message}", file=sys.stderr
        )
        yield
