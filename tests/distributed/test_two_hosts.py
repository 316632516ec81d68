"""torchrun on two machines, which are network namespaces with names, addresses and a cable between
them.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import PATIENCE_SECONDS
from distributed import two_hosts_program
from distributed.machines import Network, network

from tutorec.distributed.checkpoint.reading import latest_checkpoint
from tutorec.examples import dlrm
from tutorec.spmd import Ranks

pytestmark = [pytest.mark.slow, pytest.mark.world4]

SMALL = "--rows 2000 --test-rows 500 --users 40 --items 60 --batch-size 100 --no-progress".split()
DLRM = ["-m", "tutorec.examples.dlrm"]


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Network]:
    with network(2, tmp_path) as made:
        yield made


def wait_for(agents: list[subprocess.Popen[str]], log: Path, may_be_late: bool = False) -> str:
    """Wait for agents to end; what was printed. On a busy machine the last one may come after the
    end of the run, when torch closes the rendezvous.
    """
    for agent in agents:
        status = agent.wait(PATIENCE_SECONDS * 2)
        late = may_be_late and agent is agents[-1] and "RendezvousClosedError" in log.read_text()
        assert status == 0 or late, log.read_text()
    return log.read_text()


def until(holds: Callable[[], Any], log: Path) -> None:
    """Go on as soon as something holds."""
    deadline = time.monotonic() + PATIENCE_SECONDS * 2
    while not holds():
        if time.monotonic() > deadline:
            raise TimeoutError(log.read_text())
        time.sleep(0.05)


def test_hosts_ranks_and_bytes_between_them_are_what_the_environment_says(
    machines: Network, tmp_path: Path
) -> None:
    log, folder = tmp_path / "log", tmp_path / "facts"
    folder.mkdir()
    words = [str(Path(two_hosts_program.__file__)), str(folder)]
    wait_for([machines.torchrun(number, "2", 2, words, log) for number in (0, 1)], log)
    found = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(4)]
    # Which machine is the first is what the agents agree on.
    assert {each["host"] for each in found} == {"host0", "host1"}
    assert found[0]["host"] == found[1]["host"] != found[2]["host"] == found[3]["host"]
    assert [each["local"] for each in found] == [[0, 0, 2], [0, 1, 2], [1, 0, 2], [1, 1, 2]]
    assert [each["local_size"] for each in found] == [2] * 4
    assert [each["inside"] for each in found] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [each["across"] for each in found] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    first = found[0]
    assert all(ranks in ([0, 1], [2, 3]) for ranks in first["plan"].values())
    assert all(each["plan"] == first["plan"] for each in found)
    stages = {
        stage: count for stage, count in first["counted"].items() if stage in first["formula"]
    }
    assert stages == first["formula"] == first["simulated"]
    assert sum(stages.values()) > 0 and first["inside_bytes"] > 0
    # Ranks 0 and 2 are a group, 1 and 3: the step crosses, and the mean stays on a host.
    for each in found:
        assert each["sync"] == each["sync predicted"]
        assert each["sync"][1] == 0
    assert sum(each["sync"][0] for each in found) > 0


def last_loss(said: str) -> float:
    return float(re.findall(r"after: .*log loss (0\.\d+)", said)[-1])


def printed(words: list[str]) -> str:
    """What the example prints on this rank."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        dlrm.main(words)
    return out.getvalue()


@pytest.mark.parametrize(
    ("killed", "replaced"), [(0, True), pytest.param(1, False, marks=pytest.mark.soak)]
)
def test_a_run_outlives_a_machine(
    machines: Network, ranks: Callable[..., Ranks], tmp_path: Path, replaced: bool, killed: int
) -> None:
    log, folder, options = tmp_path / "log", tmp_path / "checkpoints", [*SMALL, "--epochs", "20"]
    words = [*DLRM, *options, "--checkpoints", str(folder), "--save-every", "10"]
    agents = [machines.torchrun(number, "1:2", 1, words, log) for number in (0, 1)]
    until(lambda: "goes on" in log.read_text() or latest_checkpoint(folder) is not None, log)
    machines.machines[killed].kill()
    assert "after: " not in log.read_text()
    agents = [agents[1 - killed]]
    if replaced:
        agents.append(machines.torchrun(killed, "1:2", 1, words, log))
    said = wait_for(agents, log, may_be_late=replaced)
    began = [
        int(samples.replace(",", "")) for samples in re.findall(r"after ([\d,]+) samples", said)
    ]
    assert began and began == sorted(began) and began[0] >= 1000
    assert replaced or "1 rank(s), 100 samples each" in said  # a plan for the rank that is left
    whole = ranks(1).run(printed, options)[0]
    # Fewer ranks or as many, the steps are the same: the model is that of a run that nobody
    # disturbed.
    assert last_loss(said) == pytest.approx(last_loss(whole), abs=2e-3)


SUMS = """
import torch.distributed as dist, torch, tutorec.spmd
group = tutorec.spmd.init(timeout=15)
for number in range(10**9):
    try:
        dist.all_reduce(torch.ones(1))
    except RuntimeError as error:
        raise SystemExit(f"rank {group.rank()} gave up: {error}")
    if number == 5:
        print(f"rank {group.rank()} is in step", flush=True)
"""


def test_a_machine_that_falls_silent_is_noticed_at_the_deadline_of_the_collective(
    machines: Network, tmp_path: Path
) -> None:
    log, program = tmp_path / "log", tmp_path / "sums.py"
    program.write_text(SUMS)
    for number in (0, 1):
        machines.torchrun(number, "2", 1, [str(program)], log)
    until(lambda: all(f"rank {rank} is in step" in log.read_text() for rank in (0, 1)), log)
    machines.unplug(1)
    until(lambda: all(f"rank {rank} gave up" in log.read_text() for rank in (0, 1)), log)
    assert log.read_text().count("Timed out waiting 15000ms") >= 2
