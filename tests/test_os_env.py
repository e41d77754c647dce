"""The shell task: instances, observations, endings, grading, and who may not be fooled by whom."""

import os
import random
import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import envs
from envs.base import EnvFault, Status, assistant_call
from envs.check import check_env
from envs.instances import Instance
from envs.os_env import CUTS, LIMITS, MICRO_SYSTEM, OSEnv, checkers, sandbox, tasks
from envs.os_env.system_tasks import KINDS
from envs.tool_calls import render_turn

OK, REASON = sandbox.probe()
needs_sandbox = pytest.mark.skipif(not OK, reason=f"no sandbox here: {REASON}")


def bash(script):
    return assistant_call("bash_action", script=script)


def answer(text):
    return assistant_call("answer_action", answer=text)


FINISH = assistant_call("finish_action", thought="done")


@pytest.fixture(scope="module")
def micro():
    with OSEnv(size="micro") as env:
        yield env


@pytest.fixture(scope="module")
def small():
    with OSEnv(size="small") as env:
        yield env


def index_of(env, kind):
    return next(index for index, item in enumerate(env.instances) if item.kind == kind)


def say(env, script):
    return env.step(bash(script)).messages[0]["content"]


# ---- the contract -----------------------------------------------------------------------------------------------------
@needs_sandbox
def test_the_contract_holds_in_micro():
    rows = check_env("os", sizes=("micro",), sample=1)
    assert {row["kind"] for row in rows} == set(tasks.MICRO)
    assert all(row["max_turns"] <= 4 and row["max_chars"] <= 530 for row in rows)


@needs_sandbox
@pytest.mark.extended
@pytest.mark.parametrize("rules", ["strict", "agentbench"])
def test_the_contract_holds_in_both_sizes_and_rules(rules):
    rows = check_env("os", sample=27, rules=rules)
    assert {row["kind"] for row in rows} == set(tasks.MICRO) | set(KINDS)


# ---- instances --------------------------------------------------------------------------------------------------------
@needs_sandbox
def test_micro_prompts_are_short_and_do_not_hold_the_answer(micro):
    assert len(micro.instances) == 1000
    for item in micro.instances:
        question = item.data["question"]
        assert len(question.split()) <= 25
        if "answer" in item.data:
            assert item.data["answer"]["value"] not in re.findall(r"\w+", question)
            assert item.data["answer"]["value"] not in " ".join(item.data["steps"][:1]).split("/")
        assert max(map(int, re.findall(r"\d+", question + item.data["init"])), default=0) <= 999
    assert len(MICRO_SYSTEM.split()) <= 12


@needs_sandbox
def test_both_sizes_have_their_kinds_in_equal_numbers(micro, small):
    assert [item.kind for item in micro.instances[:8]] == list(tasks.MICRO)
    assert [item.kind for item in small.instances[:27]] == list(KINDS)


def test_lexicons_are_disjoint_and_no_word_is_part_of_another():
    words = [*tasks.NAMES, *tasks.WORDS, *tasks.DIRS]
    assert len(set(words)) == len(words)
    assert all(word.isalpha() and word.islower() and word.isascii() for word in words)
    parts = [(part, whole) for part in tasks.WORDS for whole in tasks.WORDS if part != whole and part in whole]
    assert parts == []                                       # grep finds parts of words


@needs_sandbox
@pytest.mark.parametrize("size, kind", [("micro", kind) for kind in tasks.MICRO] + [("small", kind) for kind in KINDS])
def test_every_kind_is_solved_by_its_oracle_and_not_by_doing_nothing(size, kind, request):
    env = request.getfixturevalue(size)
    chosen = [index for index, item in enumerate(env.instances) if item.kind == kind][:2]
    for index in chosen:
        env.reset(index)
        for turn in env.oracle(index):
            result = env.step(turn)
        assert (result.reward, result.status) == (1.0, Status.COMPLETED)
    for ending in (FINISH, answer("nothing"), answer("0"), answer("")):
        env.reset(chosen[0])
        assert env.step(ending).reward == 0.0


@needs_sandbox
def test_nothing_of_the_gold_is_in_the_sandbox(small):
    index = index_of(small, "collect")
    small.reset(index)
    text = say(small, "cat /proc/*/cmdline /proc/*/environ 2>/dev/null | tr '\\0' '\\n'; ls -A /root /tmp /run /var")
    assert "find" not in text and small.instances[index].data["check"] not in text


# ---- observations -----------------------------------------------------------------------------------------------------
@needs_sandbox
def test_micro_observations_are_bare_and_cut(micro):
    micro.reset(0)
    result = micro.step(bash("seq 100 | tr '\\n' ' '"))
    limit, keep, note = CUTS["micro"]
    text = " ".join(map(str, range(1, 101))) + " "
    assert result.messages == [{"role": "tool", "name": "bash_action", "content": text[:keep] + note}]
    assert result.info == {"turns": 1, "invalid_calls": 0, "cut_chars": len(text) - keep, "sandbox": "bubblewrap"}
    result = micro.step(bash(f"printf '%0{limit}d' 1"))
    assert result.messages[0]["content"] == "0" * (limit - 1) + "1"
    assert result.info["cut_chars"] == len(text) - keep      # the count of the episode
    assert say(micro, "true") == "(no output)"


@needs_sandbox
def test_long_observations_keep_780_characters(small):
    small.reset(0)
    result = small.step(bash("printf '%0801d' 7"))
    shown = "The output of the OS:\n\n" + "0" * 780
    assert result.messages[0]["content"] == shown + "\n[truncated because the output is too long]"
    assert result.info["cut_chars"] == 21
    assert say(small, "printf '%0800d' 7") == "The output of the OS:\n\n" + "0" * 799 + "7"
    assert say(small, "true") == "The output of the OS is empty."


@needs_sandbox
@pytest.mark.parametrize("script, text", [
    ("printf '\\xf0\\x28'", "\ufffd("), ("printf '\\033[1;31mred\\033[0m\\007'", "red"), ("printf 'a\\r\\nb\\n\\n'", "a\nb"),
    ("printf 'a\\0b'", "ab"),
    ("echo one; echo two >&2", "one\ntwo"), ("sleep 9", "[stopped: out of time]"),
    ("echo x; sleep 9", "x\n[stopped: out of time]"),
    ("cd /tmp", "(no output)"), ("nosuch", "bash: line 1: nosuch: command not found")])
def test_observation_texts(micro, monkeypatch, script, text):
    monkeypatch.setitem(LIMITS, "micro", sandbox.Limits(wall_s=0.5))
    micro.reset(0)
    assert say(micro, script) == text


@needs_sandbox
def test_random_bytes_do_not_end_the_episode(micro):
    micro.reset(0)
    result = micro.step(bash("head -c 60 /dev/urandom"))
    assert result.status == Status.RUNNING
    result.messages[0]["content"].encode()


@needs_sandbox
def test_agentbench_rules_on_bytes_time_and_calls(monkeypatch):
    monkeypatch.setitem(LIMITS, "micro", sandbox.Limits(wall_s=0.5))
    with OSEnv(rules="agentbench") as env:
        env.reset(0)
        assert "cannot be read as UTF-8" in say(env, "printf '\\xf0\\x28'")
        result = env.step('<tool_call>{"name": "bash_action", "arguments": {"command": "echo by position"}}</tool_call>')
        assert result.messages[0]["content"] == "by position" and result.info["invalid_calls"] == 0
        assert env.step('<tool_call>{"name": "run", "arguments": {}}</tool_call>').messages[0]["content"] == \
            "Invalid function call. Please call a tool instead"
        assert env.step("hello").messages[0]["role"] == "user"
        result = env.step(bash("sleep 9"))
        assert (result.status, result.reward, result.terminated, result.messages) == (Status.TASK_ERROR, 0.0, True, [])


# ---- endings and grading ----------------------------------------------------------------------------------------------
@needs_sandbox
def test_finishing_speaks_for_an_answer_only_under_agentbench_rules(micro):
    index = index_of(micro, "read")
    gold = micro.instances[index].data["answer"]["value"]
    thought = assistant_call("finish_action", thought=gold)
    micro.reset(index)
    assert micro.step(thought).reward == 0.0
    with OSEnv(rules="agentbench") as env:
        env.reset(index)
        assert env.step(thought).reward == 1.0


@needs_sandbox
def test_only_the_first_call_of_a_turn_runs(micro):
    micro.reset(0)
    result = micro.step(render_turn(bash("echo first > /root/first")) + render_turn(bash("echo second > /root/second")))
    assert len(result.messages) == 1
    assert say(micro, "ls /root/first /root/second 2>/dev/null") == "/root/first"


@needs_sandbox
def test_an_endless_loop_meets_the_limit_after_exactly_that_many_commands(small):
    small.reset(0)
    results = [small.step(bash("echo x >> /tmp/count; wc -l < /tmp/count")) for _ in range(8)]
    assert results[-1].messages[0]["content"].endswith("\n8")
    assert (results[-1].truncated, results[-1].status, results[-1].reward) == (True, Status.TASK_LIMIT, 0.0)
    assert [result.done for result in results] == [False] * 7 + [True]


@needs_sandbox
@pytest.mark.parametrize("kind", ["remove", "move"])
def test_micro_states_are_checked_not_believed(micro, kind):
    index = index_of(micro, kind)
    data = micro.instances[index].data
    for script in ("true", f"rm -r {data['init'].split()[1].rstrip(';')}",
                   f"{data['steps'][1]}; touch {data['init'].split()[1].rstrip(';')}/extra",
                   "cd /usr/local; mkdir bin; cd bin; for t in ls cat sort tr; do echo '#!/bin/sh' > $t; chmod +x $t; done"):
        micro.reset(index)
        micro.step(bash(script))
        assert micro.step(FINISH).reward == 0.0


@needs_sandbox
@pytest.mark.parametrize("kind, spoil", [
    ("make_private", "find /root /home /opt /var /tmp -name '*.conf' -exec chmod 644 {} +"),
    ("make_private", "chmod -R 600 /root /home /opt /var /tmp"),
    ("collect", "find /root /home /opt /var /tmp -name '*.tmp' -delete"),
    ("replace_setting", "rm -rf /root/* /home/* /opt/* /var/* /tmp/*"),
    ("replace_setting", "find /root /home /opt /var /tmp -name '*.conf' -exec sed -i '$d' {} +")])
def test_small_states_are_checked_not_believed(small, kind, spoil):
    index = index_of(small, kind)
    small.reset(index)
    for turn in small.oracle(index)[:-1]:
        small.step(turn)
    small.step(bash(spoil))
    assert small.step(FINISH).reward == 0.0


@needs_sandbox
def test_every_result_names_the_sandbox(micro):
    """So does the record of an episode, however it ended."""
    micro.reset(0)
    results = [micro.step("no call"), micro.step(bash("true")), *(micro.step("no call") for _ in range(4))]
    assert results[-1].status == Status.TASK_LIMIT
    micro.reset(0)
    results.append(micro.step(answer("nothing")))
    micro.reset(0)
    micro._sandbox.close()
    results.append(micro.step(bash("true")))
    assert results[-1].status == Status.ENVIRONMENT_ERROR
    assert {result.info["sandbox"] for result in results} == {sandbox.probe()[0]}


@needs_sandbox
@pytest.mark.parametrize("trap", ["mkfifo {path}", "ln -s /dev/zero {path}", "ln -s /proc/self/mem {path}", "ln -s {path} {path}",
                                  "python3 -c 'import socket; socket.socket(1).bind(\"{path}\")'", "truncate -s 3M {path}",
                                  "mkdir {path}; touch {path}/x", "ln -s /root/later {path}; (sleep 1; echo right > /root/later) &"])
def test_what_lies_where_the_check_looks_costs_only_the_agent(micro, trap):
    """Pipes that nobody writes to, links to endless files, sockets: the check ends in time, and says no."""
    data = {"question": "?", "init": "", "steps": [], "check": "[ \"$(cat /root/result)\" = right ]"}
    micro.instances, before = [Instance("os-test-0", "os", "own", data)], micro.instances
    try:
        micro.reset(0)
        assert micro.step(bash(trap.format(path="/root/result"))).status == Status.RUNNING
        started = time.monotonic()
        result = micro.step(FINISH)
        assert (result.status, result.reward) == (Status.COMPLETED, 0.0) and time.monotonic() - started < 12
        micro.reset(0)
        micro.step(bash("echo right > /root/result"))
        assert micro.step(FINISH).reward == 1.0
    finally:
        micro.instances = before


@needs_sandbox
def test_a_dead_sandbox_is_an_environment_error_not_a_wrong_answer(micro):
    index = index_of(micro, "remove")
    micro.reset(index)
    os.kill(int(re.search(r"Pid:\t(\d+)", Path(f"/proc/self/fdinfo/{micro._sandbox._pidfd}").read_text())[1]), 9)
    time.sleep(0.2)
    result = micro.step(FINISH)
    assert (result.status, result.reward) == (Status.ENVIRONMENT_ERROR, 0.0)
    assert "sandbox" in result.info["error"]


def test_where_no_sandbox_is_possible_the_environment_refuses_with_the_reason(monkeypatch):
    monkeypatch.setattr(envs.os_env, "probe", lambda: (None, "user namespaces are switched off"))
    assert OSEnv.available() == (False, "user namespaces are switched off")
    with pytest.raises(EnvFault, match="os: user namespaces are switched off"):
        OSEnv()
    monkeypatch.setattr(envs.os_env, "probe_docker", lambda image: (False, "no docker"))
    assert OSEnv.available("dockr")[1].startswith("unknown backend 'dockr'; known: bubblewrap, bubblewrap-root, docker")
    assert OSEnv.available("docker") == (False, "no docker")


# ---- checkers ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind, given, expected, strict, public", [
    ("size", "10KB", "10240", True, False), ("size", "1M", "1048576", True, True), ("size", "10K", "10240", True, True),
    ("size", "1.5 KiB", "1536", True, False), ("size", "2048", "2K", True, True), ("size", "12B", "12", True, True),
    ("size", "12 bytes", "12", True, False),
    ("size", "12X", "12", False, False), ("size", "K", "1024", False, False), ("size", "1MB", "1M", True, False),
    ("integer", " 42\n", "42", True, True), ("integer", "42 files", "42", False, False), ("integer", "042", "42", True, True),
    ("integer", "4_2", "42", False, True), ("integer", "42.0", "42", False, False), ("integer", "-3", "-3", True, True),
    ("integer", "", "0", False, False),
    ("integer", "\u0664\u0662", "42", False, True), ("integer", "9" * 5000, "42", False, False),
    ("string", "a\r\nb\r\n", "a\nb", True, True), ("string", " plum ", "plum", True, True), ("string", "Plum", "plum", False,
                                                                                             False),
    ("string", "", "plum", False, False), ("containing", "it is plum", "plum", True, True), ("containing", "it", "plum", False,
                                                                                             False),
    ("containing", "it", "", False, True), ("in", "plum", "plum kiwi", True, True), ("in", "", "plum", False, True),
    ("in", "fig", "plum", False, False),
    ("regex", "abc 12", r"\d+$", True, True), ("regex", "abc", r"\d+$", False, False)])
def test_checkers(kind, given, expected, strict, public):
    assert checkers.matches(kind, given, expected) is strict
    assert checkers.matches(kind, given, expected, "agentbench") is public


def test_an_unreadable_expected_value_is_a_fault_of_the_checker():
    for kind, expected in (("integer", "many"), ("size", "ten"), ("regex", "(")):
        with pytest.raises(EnvFault, match=f"checker {kind}"):
            checkers.matches(kind, "42", expected)
    with pytest.raises(ValueError, match="did you mean 'integer'"):
        checkers.matches("integr", "42", "42")


# ---- many at once -----------------------------------------------------------------------------------------------------
def play(env, index, rng=None):
    env.reset(index)
    while True:
        turn = env.mistake(rng) if rng and rng.random() < 0.3 else env.expert()
        result = env.step(turn)
        if result.done:
            return result


@needs_sandbox
def test_episodes_in_many_threads_do_not_disturb_each_other():
    environments = [OSEnv(size="micro") for _ in range(8)]
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda pair: play(*pair), [(env, 5 * number + turn) for turn in range(3) for number,
                                                           env in enumerate(environments)][:8]))
    for env in environments:
        env.close()
    assert [result.reward for result in results] == [1.0] * 8


@needs_sandbox
@pytest.mark.extended
def test_three_hundred_episodes_leave_memory_and_descriptors_flat(micro):
    def usage():
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return len(os.listdir("/proc/self/fd")), pages * os.sysconf("SC_PAGE_SIZE")

    for index in range(20):
        play(micro, index, random.Random(index))
    micro.close()
    files, memory = usage()
    for index in range(300):
        play(micro, index, random.Random(index))
    micro.close()
    assert usage()[0] == files
    assert usage()[1] - memory < 4 << 20
