"""Many mixed episodes at once, with injected crashes, hangs and garbage: each is accounted for once, none is scored by
accident."""

import math
import os
import random
import select
import signal
import threading
import time
from collections import Counter
from pathlib import Path

import pytest

import envs
from envs.base import EnvFault, assistant_call
from envs.tool_calls import render_turn
from eppo.chat import ChatFormat
from eppo.generate import Completion
from eppo.rollouts import EnvPool, Job, RolloutLimits, run_jobs
from tests.models import tiny_tokenizer

HERE = [task for task in envs.TASKS if envs.available(task)[0]]
FATES = ("oracle", "oracle", "oracle", "oracle", "crash in reset", "crash in step", "fault in step", "broken generator",
         "garbage", "talk",
         "slow step", "dead sandbox", "endless command")
# what each fate must come to: status, and whether the episode may have a reward
ENDINGS = {"oracle": {"completed"}, "slow step": {"completed"}, "crash in reset": {"environment error"},
           "crash in step": {"environment error"}, "fault in step": {"environment error"}, "broken generator": {"model error"},
           "talk": {"task limit reached"}, "dead sandbox": {"environment error", "completed"},
           "garbage": {"task limit reached", "completed", "agent validation failed", "agent context limit"},
           "endless command": {"completed"}}
GARBAGE = ("<tool_call>", '<tool_call>{"name": 3}</tool_call>', "\ufffd\x00" * 40,
           '<tool_call>{"name": "x", "arguments": []}</tool_call>',
           "<think>" * 30, "{" * 300, '<tool_call>{"name": "answer_action", "arguments": {"answer": ""}}</tool_call>')


def fate_of(seed):
    return FATES[random.Random(seed).randrange(len(FATES))] if seed % 97 else "endless command"


class Hostile:
    """An environment to which things happen, as the episode's seed says."""

    def __init__(self, task):
        self.inner = envs.make(task, size="micro", split="train")
        self.task, self.instances = task, self.inner.instances

    @property
    def tools(self):
        return self.inner.tools

    def reset(self, index, seed):
        self.fate, self.steps = fate_of(seed), 0
        if self.fate == "crash in reset":
            raise RuntimeError("injected")
        return self.inner.reset(index, 0)

    def step(self, turn, finish_reason="stop"):
        self.steps += 1
        if self.fate == "crash in step":
            raise ValueError("injected")
        if self.fate == "fault in step":
            raise EnvFault("injected")
        if self.fate == "slow step":
            time.sleep(0.05)
        if self.fate == "dead sandbox" and self.task == "os" and self.steps == 1:
            signal.pidfd_send_signal(self.inner._sandbox._pidfd, signal.SIGKILL)
            select.select([self.inner._sandbox._pidfd], [], [], 10)          # readable when it is dead
        return self.inner.step(turn, finish_reason=finish_reason)

    def close(self):
        self.inner.close()


class Script:
    """A generator that plays the oracle, or what the fate of the episode is; remembers nothing of sessions that ended."""

    def __init__(self, chat):
        self.chat, self.turns, self.lock = chat, {}, threading.Lock()
        self.oracles = {task: envs.make(task, size="micro", split="train") for task in HERE}
        self.cache = {}

    def generate(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        task, index, seed = request.session.split(":")
        with self.lock:
            turn = self.turns[request.session] = self.turns.get(request.session, -1) + 1
            if (task, index) not in self.cache:
                self.cache[task, index] = [render_turn(entry) for entry in self.oracles[task].oracle(int(index))]
            script = self.cache[task, index]
        fate = fate_of(int(seed))
        if fate == "broken generator" and turn == min(1, len(script) - 1):
            raise ConnectionError("injected")
        text = script[min(turn, len(script) - 1)]
        if fate == "garbage":
            text = random.Random(f"{seed}/{turn}").choice(GARBAGE)
        elif fate == "talk":
            text = "let me think about that"
        elif fate == "endless command" and task in ("os", "db") and turn == 0:
            text = render_turn(assistant_call("bash_action", script="sleep 1000") if task == "os" else assistant_call(
                "execute_sql", query="WITH RECURSIVE r(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM r) SELECT COUNT(*) FROM r"))
        elif fate == "endless command" and task in ("os", "db"):
            text = script[min(turn - 1, len(script) - 1)]
        ids = self.chat.turn_ids(text)
        return Completion(ids, [-1.0] * len(ids), "stop", 0, request.pool)

    def end(self, session):
        with self.lock:
            self.turns.pop(session, None)

    def close(self):
        for env in self.oracles.values():
            env.close()


def usage():
    """(open files, resident MB of this process, its threads, its descendants)."""
    parents = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                parents[int(entry)] = int(Path(f"/proc/{entry}/stat").read_text().rsplit(")", 1)[1].split()[1])
            except OSError:
                continue
    family = {os.getpid()}
    while (grown := family | {child for child, parent in parents.items() if parent in family}) != family:
        family = grown
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
    return len(os.listdir("/proc/self/fd")), resident, threading.active_count(), len(family) - 1


def run(count, rounds, workers):
    """Plays `count` episodes in `rounds` equal parts; the trajectories' facts, and the usage after each part."""
    chat, pool, facts, usages = ChatFormat(tiny_tokenizer()), EnvPool(Hostile), [], []
    script = Script(chat)
    limits = RolloutLimits(max_tokens=20_000, max_turn_tokens=4000)
    try:
        for part in range(rounds):
            numbers = range(part * count // rounds, (part + 1) * count // rounds)
            jobs = [Job(HERE[number % len(HERE)], number // len(HERE) % 200, f"group-{number}", number) for number in numbers]
            trajectories = run_jobs(jobs, pool, script, chat, limits, workers=workers, concurrency=64)
            assert len(trajectories) == len(jobs)
            for job, found in zip(jobs, trajectories, strict=True):
                assert (found.task, found.group_id, found.seed) == (job.task, job.group_id, job.seed)
                facts.append((job.task, fate_of(job.seed), found.status, found.reward, found.success, found.info.get("error",
                                                                                                                     "")))
            assert not script.turns                          # every session was ended
            usages.append(usage())
    finally:
        pool.close()
        script.close()
    return facts, usages


def judge(facts, count):
    assert len(facts) == count
    wrong = Counter()
    for task, fate, status, reward, success, error in facts:
        good = status in ENDINGS[fate]
        if fate == "dead sandbox":                           # only the shell has one
            good &= (status == "environment error") == (task == "os") == (not success)
        good &= math.isnan(reward) == (status in ("environment error", "model error"))
        good &= success == (status == "completed" and reward == 1.0)
        if fate in ("oracle", "slow step", "endless command"):
            good &= success
        if fate in ("garbage", "talk", "crash in reset", "crash in step", "fault in step", "broken generator"):
            good &= not success
        if fate in ("crash in reset", "crash in step", "fault in step", "broken generator"):
            good &= "injected" in error
        if not good:
            wrong[task, fate, status, reward, error] += 1
    assert not wrong, wrong.most_common(10)


def test_two_hundred_hostile_episodes_are_each_accounted_for():
    facts, _ = run(200, 1, workers=16)
    judge(facts, 200)
    assert {fate for _, fate, *_ in facts} == set(FATES)


@pytest.mark.extended
@pytest.mark.timeout(1800)
def test_ten_thousand_hostile_episodes_leave_memory_and_handles_flat(record_property):
    begin = time.monotonic()
    facts, usages = run(10_000, 10, workers=16)
    judge(facts, 10_000)
    files, memory, threads, processes = zip(*usages)
    figures = {"seconds": round(time.monotonic() - begin, 1), "files": files, "memory_mb": [round(entry) for entry in memory],
               "threads": threads, "processes": processes, "statuses": dict(Counter(status for _, _, status, *_ in facts))}
    print(figures)
    for name, value in figures.items():
        record_property(name, str(value))
    # environments are made on demand, up to 64 a task, in the first parts; after that nothing grows
    assert max(files[5:]) <= max(files[2:5]) + 16 and max(processes[5:]) <= max(processes[2:5]) + 8
    assert memory[-1] - memory[4] < 48
