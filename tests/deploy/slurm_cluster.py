"""A real Slurm cluster on this machine: munged, slurmctld and several slurmds with their own ports and folders."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from eventually import wait_until
from free_port import free_ports

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue")


def missing() -> str:
    """Return why no cluster can be started here; "" if it can."""
    if os.geteuid() != 0:
        return "slurmd must run as root"
    absent = [name for name in PROGRAMS if _find(name) is None]
    return f"{', '.join(absent)} missing: apt-get install slurm-wlm munge" if absent else ""


class SlurmCluster:
    """Nodes n0, n1, ... on this machine, each with its own slurmd. Everything it writes is in a temporary folder."""

    def __init__(self, num_nodes: int = 2, cpus: int = 2) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="neso-slurm-"))
        self.nodes = [f"n{number}" for number in range(num_nodes)]
        self._processes: list[subprocess.Popen[bytes]] = []
        self._conf = self.root / "slurm.conf"
        self.environment = {**os.environ, "SLURM_CONF": str(self._conf)}
        self.environment["PATH"] += ":/usr/sbin:/usr/bin"
        for name in [name for name in self.environment if name.startswith("SLURM_") and name != "SLURM_CONF"]:
            del self.environment[name]
        try:
            self._start(cpus)
        except BaseException:
            self.stop()
            raise

    def __enter__(self) -> SlurmCluster:
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def call(self, *command: str, timeout: float = 60, **options: object) -> str:
        """Run a command of Slurm; returns its output. Raises `AssertionError` if it fails."""
        result = subprocess.run(
            command, env=self.environment, capture_output=True, text=True, timeout=timeout, **options
        )  # type: ignore[call-overload]
        assert result.returncode == 0, f"{command}: {result.stdout}{result.stderr}\n{self.logs()}"
        return str(result.stdout)

    def submit(self, script: Path, *options: str, cwd: Path) -> int:
        """Submit a job; returns its number."""
        return int(self.call("sbatch", "--parsable", *options, str(script), cwd=cwd).split(";")[0])

    def state(self, job: int) -> str:
        """Return the state of a job, such as RUNNING or COMPLETED."""
        words = self.call("scontrol", "--oneliner", "show", "job", str(job)).split()
        return next(word.partition("=")[2] for word in words if word.startswith("JobState="))

    def logs(self) -> str:
        """Return the ends of the logs of the daemons."""
        return "\n".join(
            f"== {path.name}\n{path.read_text(errors='replace')[-1500:]}" for path in self.root.glob("*.log")
        )

    def stop(self) -> None:
        """End the jobs and the daemons, and remove the folder."""
        if (self.root / "started").exists():
            subprocess.run(
                ["scancel", "--full", "--signal=KILL", "--user=root"],
                env=self.environment,
                timeout=30,
                check=False,
            )
            with suppress(AssertionError):
                wait_until(lambda: not self.call("squeue", "--noheader").strip(), 30)
        for process in reversed(self._processes):
            process.terminate()
        for process in reversed(self._processes):
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        shutil.rmtree(self.root, ignore_errors=True)

    # -- daemons ------------------------------------------------------------------------------------------------

    def _start(self, cpus: int) -> None:
        key = self.root / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o400)
        self.root.chmod(0o755)
        munge_socket = self.root / "munge.socket"
        self._daemon(
            "munged", "--foreground", "--force", f"--key-file={key}", f"--socket={munge_socket}",
            *(f"--{name}-file={self.root / f'munge.{name}'}" for name in ("pid", "seed", "log")),
            log="munged",
        )  # fmt: skip
        wait_until(munge_socket.exists)
        ports = free_ports(1 + len(self.nodes))
        self._conf.write_text(self._configuration(cpus, ports, munge_socket))
        (self.root / "state").mkdir()
        self._daemon("slurmctld", "-D", "-i", "-f", str(self._conf), log="slurmctld")
        self._wait_for(lambda: b"UP" in self._run("scontrol", "ping"), "slurmctld")
        for node in self.nodes:
            (self.root / f"spool-{node}").mkdir()
            self._daemon("slurmd", "-D", "-N", node, "-f", str(self._conf), log=f"slurmd-{node}")
        self._wait_for(
            lambda: (
                self._run("sinfo", "--noheader", "-o", "%T %D").split() == [b"idle", b"%d" % len(self.nodes)]
            ),
            "slurmd",
        )
        (self.root / "started").touch()

    def _configuration(self, cpus: int, ports: list[int], munge_socket: Path) -> str:
        lines = [
            "ClusterName=test",
            f"SlurmctldHost={socket.gethostname()}(127.0.0.1)",
            f"SlurmctldPort={ports[0]}",
            "SlurmUser=root",
            "SlurmdUser=root",
            "AuthType=auth/munge",
            f"AuthInfo=socket={munge_socket}",
            "CredType=cred/munge",
            f"StateSaveLocation={self.root / 'state'}",
            f"SlurmdSpoolDir={self.root}/spool-%n",
            f"SlurmctldPidFile={self.root / 'slurmctld.pid'}",
            f"SlurmdPidFile={self.root}/slurmd-%n.pid",
            f"SlurmctldLogFile={self.root / 'slurmctld.log'}",
            f"SlurmdLogFile={self.root}/slurmd-%n.log",
            "ProctrackType=proctrack/pgid",
            "TaskPlugin=task/none",
            "JobAcctGatherType=jobacct_gather/none",
            "SelectType=select/cons_tres",
            "SelectTypeParameters=CR_CPU",
            "SwitchType=switch/none",
            "MpiDefault=pmi2",
            "ReturnToService=2",
            "SlurmdTimeout=300",
            "SchedulerParameters=sched_interval=1",
            "SlurmdParameters=config_overrides",
            *(
                f"NodeName={node} NodeHostname={socket.gethostname()} NodeAddr=127.0.0.1 Port={port} CPUs={cpus} "
                "State=UNKNOWN"
                for node, port in zip(self.nodes, ports[1:], strict=True)
            ),
            f"PartitionName=test Nodes={','.join(self.nodes)} Default=YES State=UP OverSubscribe=FORCE:4",
        ]
        return "\n".join(lines) + "\n"

    def _daemon(self, name: str, *arguments: str, log: str) -> None:
        program = _find(name)
        assert program is not None
        with (self.root / f"{log}.out.log").open("wb") as output:
            process = subprocess.Popen(
                [program, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=self.environment,
            )
        self._processes.append(process)

    def _run(self, *command: str) -> bytes:
        return subprocess.run(
            command, env=self.environment, capture_output=True, timeout=30, check=False
        ).stdout

    def _wait_for(self, condition: Callable[[], object], what: str) -> None:
        def holds() -> object:
            ended = [process.args[0] for process in self._processes if process.poll() is not None]  # type: ignore[index]
            assert not ended, f"{ended} ended\n{self.logs()}"
            return condition()

        try:
            wait_until(holds)
        except AssertionError as error:
            raise AssertionError(f"{what} is not ready: {error}\n{self.logs()}") from None


def _find(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
