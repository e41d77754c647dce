"""The sandbox of `envs.os_env.sandbox` in a Docker container, by choice only (`backend="docker"` or "docker:IMAGE").

One container per episode: no network, no folder of the host, no new privileges, no capabilities but those over its own files,
caps on memory, processes, CPU, open files and the size of a file. Its root is writable, since the tasks change it, and goes with
the container; what all its files take together is capped only where the engine's storage has quotas. Commands enter by `docker
exec`; what bounds them inside is `timeout`. The image needs bash, coreutils and tar, and what its tasks need (ubuntu and python3
for AgentBench's).
"""

from __future__ import annotations

import functools
import os
import select
import shutil
import subprocess
import time
import weakref
from typing import Self

from envs.base import EnvFault
from envs.os_env.sandbox import MAX_SCRIPT_BYTES, CopyFailed, Output
from envs.os_env.server import CHECK_ENVIRONMENT, ENVIRONMENT, Limits

IMAGE = "ubuntu:22.04"
STATE = "/run/.shell"                                        # working directory and exported variables between commands
PREPARE = (f"unset BASH_ENV; [ -f {STATE} ] && . {STATE}\n"
           f"trap '{{ printf \"cd %q\\n\" \"$PWD\"; export -p; }} > {STATE}' EXIT\n")
TIMED_OUT = (124, 137)                                       # of timeout: it ended the command, or had to kill it
GRACE_S = 5.0                                                # for the engine, beside the time of the command


class DockerSandbox:
    """As `sandbox.Sandbox`: run, check, execute, copy, close. EnvFault where the engine fails."""

    def __init__(self, init: str = "", limits: Limits | None = None, image: str = "") -> None:
        self.limits, self.image = limits or Limits(), image or IMAGE
        self._image: weakref.finalize | None = None
        memory, processes = str(self.limits.memory_bytes), str(self.limits.processes + 4)
        caps = {"fsize": self.limits.file_bytes, "cpu": self.limits.cpu_s, "nofile": self.limits.open_files, "core": 0}
        options = ["--rm", "--detach", "--network", "none", "--memory", memory, "--memory-swap", memory, "--cpus", "2",
                   "--pids-limit", processes, *(word for name, cap in caps.items() for word in ("--ulimit", f"{name}={cap}")),
                   "--security-opt", "no-new-privileges", "--cap-drop", "ALL", "--cap-add", "DAC_OVERRIDE", "--cap-add", "FOWNER",
                   "--cap-add", "CHOWN", "--workdir", "/root", "--hostname", "agent"]
        self.container = _docker("run", *options, self.image, "sleep", "infinity").decode().strip()
        self._finalizer = weakref.finalize(self, _remove, self.container)
        _docker("exec", "-i", self.container, "sh", "-c", f"mkdir -p /run && cat > {STATE}-env", stdin=PREPARE.encode())
        output = self.check(init)
        if output.code:
            self.close()
            raise EnvFault(f"sandbox: the script that prepares the world failed with code {output.code}: {output.text[-400:]}")

    def run(self, script: str, wall_s: float | None = None) -> Output:
        """Run a bash script of the model in the persistent world."""
        script = script.replace("\0", "")
        if len(script.encode()) > MAX_SCRIPT_BYTES:
            return Output(f"bash: script longer than {MAX_SCRIPT_BYTES} bytes\n".encode(), 126)
        return self._exec(["bash", "--noprofile", "--norc", "-c", script], ENVIRONMENT | {"BASH_ENV": f"{STATE}-env"}, wall_s)

    def check(self, script: str, *arguments: str, alone: bool = False, wall_s: float | None = None) -> Output:
        """Run a script of ours with a clean environment; `alone`: end the other processes first."""
        return self.execute(["bash", "--noprofile", "--norc", "-c", script, "check"], *arguments, alone=alone, wall_s=wall_s)

    def execute(self, argv: list[str], *arguments: str, alone: bool = False, wall_s: float | None = None) -> Output:
        """As `check`, with any command."""
        if alone:                                            # PID 1 and this command's own shell survive
            self._exec(["bash", "-c", "kill -9 -1"], CHECK_ENVIRONMENT, wall_s)
        return self._exec([*argv, *(argument.replace("\0", "") for argument in arguments)], CHECK_ENVIRONMENT, wall_s)

    def copy(self) -> "DockerSandbox":
        """A new container with the files of this one, whose processes are ended first.

        Raises:
            CopyFailed: the engine cannot keep or start the copy.
        """
        self.execute(["true"], alone=True)
        try:
            image = _docker("commit", self.container).decode().strip()
        except EnvFault as fault:
            raise CopyFailed(f"the state cannot be copied: {fault}") from fault
        try:
            twin = DockerSandbox("", self.limits, image)
        except EnvFault:
            _remove_image(image)
            raise
        twin._image = weakref.finalize(twin, _remove_image, image)
        return twin

    def close(self) -> None:
        """Remove the container, and the image that a copy was made of; safe to call twice."""
        self._finalizer()
        if self._image is not None:
            self._image()

    def _exec(self, argv: list[str], environment: dict[str, str], wall_s: float | None) -> Output:
        wall_s, cap = self.limits.wall_s if wall_s is None else wall_s, self.limits.output_bytes
        settings = [word for name, value in environment.items() for word in ("--env", f"{name}={value}")]
        command = ["docker", "exec", *settings, self.container, "timeout", "-k", "1", str(wall_s), *argv]
        with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
            data, why = _read(process, cap, time.monotonic() + wall_s + GRACE_S)
            if why != "exit":
                process.kill()
            code = process.wait()
        if code == 125:
            raise EnvFault(f"sandbox: docker exec failed: {data[-400:].decode(errors='replace')}")
        if why != "exit":                                    # what the killed client leaves running inside ends too
            _docker("exec", self.container, "bash", "-c", "kill -9 -1")
        return Output(data, code, "timeout" if why == "exit" and code in TIMED_OUT else why)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _read(process: subprocess.Popen, cap: int, deadline: float) -> tuple[bytes, str]:
    """What the process writes, up to `cap` bytes, and why it ended; a background process may go on holding the pipe."""
    data, pipe, poller = b"", process.stdout.fileno(), select.poll()
    os.set_blocking(pipe, False)
    poller.register(pipe, select.POLLIN)
    while True:
        ended = process.poll() is not None
        if poller.poll(0 if ended else 100):
            piece = os.read(pipe, min(1 << 16, cap - len(data)))
            data += piece
            if piece and len(data) < cap:
                continue
            if len(data) >= cap:
                return data, "output"
            poller.unregister(pipe)                          # closed: only the end of the process is left to wait for
        if ended:
            return data, "exit"
        if time.monotonic() > deadline:
            return data, "timeout"


def _docker(*arguments: str, stdin: bytes | None = None) -> bytes:
    try:
        done = subprocess.run(["docker", *arguments], input=stdin, capture_output=True, timeout=120)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise EnvFault(f"sandbox: docker {arguments[0]}: {error}") from error
    if done.returncode:
        raise EnvFault(f"sandbox: docker {arguments[0]}: {' '.join(done.stderr.decode(errors='replace').split())[-400:]}")
    return done.stdout


def _remove(container: str) -> None:
    subprocess.run(["docker", "rm", "--force", container], capture_output=True)


def _remove_image(image: str) -> None:
    subprocess.run(["docker", "rmi", "--force", image], capture_output=True)


@functools.lru_cache(maxsize=4)
def probe_docker(image: str = "") -> tuple[bool, str]:
    """Whether a container of `image` (default `IMAGE`) starts and answers here, and if not, why."""
    if not shutil.which("docker"):
        return False, "docker is not installed"
    try:
        with DockerSandbox("", Limits(), image) as box:
            output = box.check("id -u")
    except EnvFault as fault:
        return False, str(fault)
    return (True, "") if output.text.strip() == "0" else (False, f"docker: unexpected answer {output.text.strip()[:100]!r}")
