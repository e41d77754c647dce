"""The Docker back end against a stand-in for the client that writes down how it was called; no engine is needed."""

import json
import os
import sys
import textwrap
import time

import pytest

import envs
from envs.base import EnvFault
from envs.os_env import docker
from envs.os_env.sandbox import CopyFailed
from envs.os_env.server import Limits

CLIENT = textwrap.dedent("""\
    import json, os, subprocess, sys
    words = sys.argv[1:]
    with open(os.environ["DOCKER_CALLS"], "a") as calls:
        calls.write(json.dumps(words) + "\\n")
    if os.environ.get("DOCKER_BROKEN") == words[0]:
        sys.exit("the engine is not running\\nSee 'docker run --help'.")
    flags, valued = {"run": ({"--rm", "--detach"}, {"--network", "--memory", "--memory-swap", "--cpus", "--pids-limit", "--ulimit",
                                                    "--security-opt", "--cap-drop", "--cap-add", "--workdir", "--hostname"}),
                     "exec": ({"-i"}, {"--env"}), "commit": (set(), set()), "rm": ({"--force"}, set()),
                     "rmi": ({"--force"}, set())}[words[0]]
    at = 1
    while at < len(words) and words[at].startswith("-"):    # what the real client does with an option that it does not know
        if words[at] not in flags | valued or words[at] in valued and words[at + 1].startswith("-"):
            print("unknown flag:", words[at], file=sys.stderr)
            sys.exit(125)
        at += 1 + (words[at] in valued)
    if len(words) - at < {"exec": 2}.get(words[0], 1):
        sys.exit("docker: requires an argument")
    if words[0] == "run":
        print("container-1")
    elif words[0] == "commit":
        print("sha256:copy")
    elif words[0] == "exec" and "timeout" in words:
        command = words[words.index("timeout"):]
        script = command[-1] if command[4] == "bash" else ""
        if script.startswith("!"):                          # test scripts that stand for something
            bounded = ["timeout", "-k", "1", command[3], "bash", "-c", script[1:]]
            sys.exit(subprocess.run(bounded, stdin=subprocess.DEVNULL).returncode)
        print(0 if "id -u" in command else " ".join(command[4:]))
    """)


@pytest.fixture
def calls(tmp_path, monkeypatch):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "docker").write_text(f"#!{sys.executable} -IS\n{CLIENT}")
    (tmp_path / "bin" / "docker").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("DOCKER_CALLS", str(tmp_path / "calls"))
    (tmp_path / "calls").touch()
    return lambda: [json.loads(line) for line in (tmp_path / "calls").read_text().splitlines()]


def test_a_container_has_no_network_no_privileges_and_caps(calls):
    """Every option that starts it, and no other: nothing of the host is mounted, no name space is shared."""
    limits = Limits(memory_bytes=1 << 30, processes=60, file_bytes=1 << 20, cpu_s=9, open_files=99)
    with docker.DockerSandbox("", limits, "ubuntu:24.04"):
        started = calls()[0]
    assert started[0] == "run" and started[-3:] == ["ubuntu:24.04", "sleep", "infinity"]
    assert started[1:3] == ["--rm", "--detach"]
    options = sorted(zip(started[3:-3:2], started[4:-3:2], strict=True))
    assert options == sorted([
        ("--network", "none"), ("--cap-drop", "ALL"), ("--cap-add", "CHOWN"), ("--cap-add", "DAC_OVERRIDE"), ("--cap-add", "FOWNER"),
        ("--security-opt", "no-new-privileges"), ("--memory", f"{1 << 30}"), ("--memory-swap", f"{1 << 30}"), ("--cpus", "2"),
        ("--pids-limit", "64"), ("--ulimit", f"fsize={1 << 20}"), ("--ulimit", "cpu=9"), ("--ulimit", "nofile=99"),
        ("--ulimit", "core=0"), ("--workdir", "/root"), ("--hostname", "agent")])
    assert calls()[-1] == ["rm", "--force", "container-1"]


def test_a_file_system_of_the_host_never_meets_a_container(calls):
    """A whole episode: what it starts, runs and copies names no path of the host, and no command has a standard input."""
    with docker.DockerSandbox("echo x > /root/x") as box:
        box.run("ls")
        with box.copy() as twin:
            twin.check("cat /root/x")
    assert {call[0] for call in calls()} == {"run", "exec", "commit", "rm", "rmi"}
    given = [call for call in calls() if "-i" in call]
    assert len(given) == 2 and all(call[:2] == ["exec", "-i"] and call[3:5] == ["sh", "-c"] for call in given)


def test_commands_have_their_environment_and_time(calls):
    with docker.DockerSandbox(limits=Limits(wall_s=7.0)) as box:
        box.run("ls")
        model = calls()[-1]
        box.check("ls", "x")
        ours = calls()[-1]
    assert model[-9:] == ["timeout", "-k", "1", "7.0", "bash", "--noprofile", "--norc", "-c", "ls"]
    assert "BASH_ENV=/run/.shell-env" in model and not any("BASH_ENV" in word for word in ours)
    assert "PATH=/usr/sbin:/usr/bin:/sbin:/bin" in ours and ours[-3:] == ["ls", "check", "x"]


@pytest.mark.parametrize("script, code, why, text", [
    ("!echo out; echo err >&2; exit 3", 3, "exit", "out\nerr\n"), ("!sleep 9", 124, "timeout", ""),
    ("!yes", -9, "output", None),
    ("!sleep 30 & echo done", 0, "exit", "done\n")])
def test_ends_of_commands(calls, script, code, why, text):
    with docker.DockerSandbox(limits=Limits(wall_s=0.5, output_bytes=1 << 16)) as box:
        begin = time.monotonic()
        output = box.run(script)
    assert (output.code, output.why) == (code, why) and time.monotonic() - begin < 5
    assert output.text == text if text is not None else len(output.data) == 1 << 16


def test_a_copy_is_a_committed_image_and_ends_the_processes_first(calls):
    with docker.DockerSandbox() as box:
        with box.copy():
            names = [call[0] for call in calls()]
            assert names[names.index("commit") - 2:names.index("commit") + 2] == ["exec", "exec", "commit", "run"]
            assert "sha256:copy" in next(call for call in reversed(calls()) if call[0] == "run")
            assert any("kill -9 -1" in call for call in calls())


def test_an_engine_that_fails_is_a_fault_with_its_words(calls, monkeypatch):
    docker.probe_docker.cache_clear()
    assert docker.probe_docker() == (True, "")
    assert envs.available("os", "docker:ubuntu:24.04") == (True, "")
    monkeypatch.setenv("DOCKER_BROKEN", "commit")
    with docker.DockerSandbox() as box, pytest.raises(CopyFailed, match="the engine is not running"):
        box.copy()
    monkeypatch.setenv("DOCKER_BROKEN", "run")
    docker.probe_docker.cache_clear()
    refusal = "sandbox: docker run: the engine is not running See 'docker run --help'."
    assert docker.probe_docker() == (False, refusal)
    with pytest.raises(EnvFault) as caught:
        envs.make("os", backend="docker")
    assert str(caught.value) == f"os: {refusal}"              # one line
    docker.probe_docker.cache_clear()
    monkeypatch.setenv("PATH", "/nowhere")
    assert docker.probe_docker() == (False, "docker is not installed")
    docker.probe_docker.cache_clear()
