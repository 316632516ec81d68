"""Machines that share nothing but the disk: a network namespace each, with a name, an address and a
cable to a switch.

A machine runs commands in a PID namespace of their own, so that all of them die with the first
process, as when a machine loses its power. A further namespace, the head, has the switch and the
address where agents of torchrun meet.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tutorec.examples import rendezvous

CARD = "eth0"
PORT = 29400
LAUNCH = Path(rendezvous.__file__).parent / "launch"


@dataclass
class Machine:
    """One network namespace.

    Args:
        name: Its host name.
        address: On the network.
        keeper: The process that holds the namespace.
    """

    name: str
    address: str
    keeper: subprocess.Popen[str]
    running: list[subprocess.Popen[str]] = field(default_factory=list)

    def inside(self) -> list[str]:
        """Words that run the words behind them on this machine."""
        return ["nsenter", f"--target={self.keeper.pid}", "--net", "--uts", "--"]

    def start(self, words: Sequence[str], log: Path, **environment: str) -> subprocess.Popen[str]:
        """Run a command; what it prints goes to the end of ``log``. To kill it is to kill all that
        it has started.
        """
        alone = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "--"]
        settings = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": CARD, **environment}
        with log.open("a") as out:
            started = subprocess.Popen(
                [*self.inside(), *alone, *words],
                stdout=out,
                stderr=subprocess.STDOUT,
                text=True,
                env=settings,
            )
        self.running.append(started)
        return started

    def kill(self) -> None:
        """End the machine: every process of the machine ends at once, and is gone when this
        returns.
        """
        for process in self.running:
            process.kill()
            process.wait()
        self.running.clear()


@dataclass
class Network:
    """Machines on one switch.

    Args:
        head: The machine of the switch, where agents meet.
        machines: The others.
    """

    head: Machine
    machines: list[Machine]

    def torchrun(
        self, machine: int, nodes: str, ranks: int, words: Sequence[str], log: Path
    ) -> subprocess.Popen[str]:
        """Start ranks on a machine, which meet those of the others at the head."""
        own = self.machines[machine]
        settings = {
            "HEAD": self.head.address,
            "PORT": str(PORT),
            "ADDRESS": own.address,
            "RUN": "run",
        }
        settings |= {
            "HOSTS": nodes,
            "RANKS": str(ranks),
            "RESTARTS": "1000",
            "PYTHON": sys.executable,
        }
        # A machine that is gone is noticed within ten seconds, and nobody waits long for a late
        # one. Less would take a machine that has much to do for one that is gone.
        settings["MEETING"] = "last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=10"
        return own.start(["sh", str(LAUNCH / "torchrun.sh"), *words], log, **settings)

    def unplug(self, machine: int) -> None:
        """Take the cable of a machine out: it goes on, and nobody hears of it."""
        _on(self.machines[machine], "link", "set", CARD, "down")


@contextmanager
def network(machines: int, folder: Path) -> Iterator[Network]:
    """Machines, and at the head the store through which torchrun's agents find each other.

    Where namespaces are refused the test is skipped, with the reason.
    """
    with ExitStack() as stack:
        try:
            head = stack.enter_context(_machine("head", "10.77.0.254"))
            _on(head, "link", "add", CARD, "type", "bridge")
            found = [
                stack.enter_context(_machine(f"host{n}", f"10.77.0.{n + 1}"))
                for n in range(machines)
            ]
            for number, each in enumerate(found):
                own = f"to{number}"
                _on(
                    head,
                    "link",
                    "add",
                    own,
                    "type",
                    "veth",
                    "peer",
                    "name",
                    CARD,
                    "netns",
                    str(each.keeper.pid),
                )
                _on(head, "link", "set", own, "master", CARD, "up")
            for each in (head, *found):
                _on(each, "addr", "add", f"{each.address}/24", "dev", CARD)
                _on(each, "link", "set", "lo", "up")
                _on(each, "link", "set", CARD, "up")
        except (OSError, subprocess.CalledProcessError) as error:
            text = error.stderr if isinstance(error, subprocess.CalledProcessError) else str(error)
            pytest.skip(
                "machines are network namespaces, which need Linux, iproute2 and root: "
                f"{text.strip()}"
            )
        words = [
            "-m",
            "tutorec.examples.rendezvous",
            "--address",
            head.address,
            "--port",
            str(PORT),
        ]
        head.start([sys.executable, *words], folder / "rendezvous.log")
        yield Network(head, found)


@contextmanager
def _machine(name: str, address: str) -> Iterator[Machine]:
    words = [
        "unshare",
        "--net",
        "--uts",
        "--",
        "sh",
        "-c",
        f"hostname {name} && echo here && exec sleep infinity",
    ]
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as keeper:
        try:
            assert keeper.stdout is not None, "a pipe was asked for"
            if keeper.stdout.readline() != "here\n":
                raise subprocess.CalledProcessError(1, words, stderr=keeper.communicate()[1])
            machine = Machine(name, address, keeper)
            try:
                yield machine
            finally:
                machine.kill()
        finally:
            keeper.kill()


def _on(machine: Machine, *words: str) -> None:
    subprocess.run([*machine.inside(), "ip", *words], check=True, capture_output=True, text=True)
