"""The files that start a run on several hosts: each is run here, where the machinery around it is
put in its place.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml

from tutorec.examples import rendezvous

LAUNCH = Path(rendezvous.__file__).parent / "launch"
SMALL = "--rows 2000 --test-rows 500 --users 40 --items 60 --batch-size 100 --no-progress".split()

# Two agents on this machine in the place of two hosts.
SRUN = '#!/bin/sh\n"$@" & first=$!\n"$@" && wait $first\n'
# More names than a pipe holds: who stops reading after the first one breaks it.
SCONTROL = "#!/bin/sh\necho localhost\nseq 100000\n"


def free_port() -> str:
    """A port below those that the kernel gives to whoever asks for any; each process of the tests
    begins elsewhere.
    """
    first = 10_000 + os.getpid() % 1_000 * 20
    for port in range(first, first + 20):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("localhost", port))
            return str(port)
    raise OSError(f"the ports {first} to {first + 19} are all in use")


def said(words: Sequence[str], folder: Path, **environment: str) -> str:
    settings = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHON": sys.executable, **environment}
    done = subprocess.run(
        words, cwd=folder, env=settings, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def trained_on_two_ranks(text: str) -> bool:
    return (
        "2 rank(s), 50 samples each" in text
        and re.search(r"^after: AUC 0\.\d+", text, re.MULTILINE) is not None
    )


@pytest.mark.slow
def test_the_slurm_script_trains_on_two_hosts(tmp_path: Path) -> None:
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    slurm = {"SLURM_JOB_NODELIST": "host[0-1]", "SLURM_NNODES": "2", "SLURM_JOB_ID": "7"}
    slurm |= {
        "SLURM_SUBMIT_DIR": str(tmp_path),
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "PORT": free_port(),
    }
    assert trained_on_two_ranks(
        said(["bash", str(LAUNCH / "dlrm.slurm"), *SMALL], tmp_path, **slurm)
    )
    assert list((tmp_path / "checkpoints").glob("step-*"))


def job() -> dict:
    return yaml.safe_load((LAUNCH / "pytorchjob.yaml").read_text())


@pytest.mark.slow
def test_the_command_of_the_pytorchjob_trains_under_the_variables_that_the_operator_sets(
    tmp_path: Path,
) -> None:
    spec = job()["spec"]
    (container,) = spec["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"]
    command = [*container["command"], *SMALL]
    assert command[0] == "torchrun"
    command = [sys.executable, "-m", "torch.distributed.run", *command[1:]]
    command[command.index("/checkpoints")] = str(tmp_path / "checkpoints")
    policy = spec["elasticPolicy"]
    operator = {
        "PET_NNODES": "1",  # with both ranks
        "PET_RDZV_BACKEND": policy["rdzvBackend"],
        "PET_RDZV_ENDPOINT": f"localhost:{free_port()}",
        "PET_MAX_RESTARTS": str(policy["maxRestarts"]),
        "PET_NPROC_PER_NODE": "2",
    }
    operator |= {
        each["name"]: each["value"] for each in container["env"] if "SOCKET" not in each["name"]
    }
    assert trained_on_two_ranks(said(command, tmp_path, **operator))


def test_the_pytorchjob_has_the_names_that_the_operator_looks_for() -> None:
    made = job()
    assert (made["apiVersion"], made["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    spec = made["spec"]
    pod = spec["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["name"] == "pytorch"
    assert int(spec["nprocPerNode"]) == container["resources"]["limits"]["nvidia.com/gpu"]
    assert {each["name"] for each in container["volumeMounts"]} == {
        each["name"] for each in pod["volumes"]
    }
    policy = spec["elasticPolicy"]
    assert (
        policy["minReplicas"]
        <= spec["pytorchReplicaSpecs"]["Worker"]["replicas"]
        <= policy["maxReplicas"]
    )


def test_torchrun_says_where_agents_meet_before_it_starts(tmp_path: Path) -> None:
    bare = {key: value for key, value in os.environ.items() if key != "HEAD"}
    done = subprocess.run(
        ["sh", str(LAUNCH / "torchrun.sh")],
        env=bare,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert "HEAD: set it to the machine where tutorec.examples.rendezvous runs" in done.stderr
