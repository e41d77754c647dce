"""All five environments under turns that a broken or hostile policy may send: nothing is raised, and nothing changes that
should not; what they tell and draw depends on seeds alone. Some hundred turns a task by default, 100,000 in the extended test."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import envs
from envs.base import Status, assistant_call
from envs.commands.bench import growth_mb
from envs.contract import garbage_turns
from envs.instances import fingerprint, split_of
from envs.tool_calls import parse_turn, render_turn

SETTINGS = [{"size": size, "rules": rules} for size in ("micro", "small") for rules in ("strict", "agentbench")]
TEXTS = ["", " ", "\x00", "\ud800", "\u00e9" * 300, "x" * 30_000, "w " * 20_000, "{o.name}", "../" * 40, "'\";--", "<tool_call>", "look",
         "]]", "a[b]c", "#0", "1", "none", "\n\n", "%s%n", "{{7*7}}", "__import__('os')", "</tool_call>", "null"]
ENDLESS = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT COUNT(*) FROM c"
SQL = ["SELECT {}", "SELECT * FROM `{}`", "DROP TABLE {}", "DELETE FROM {}", "UPDATE {} SET x = 1", "INSERT INTO {} VALUES ({})",
       "SHOW TABLES", "DESCRIBE {}", "ATTACH '{}' AS x", "PRAGMA {}", "SELECT 1; DROP TABLE {}", "CREATE TABLE {} (a TEXT)", "BEGIN",
       "ALTER TABLE {} ADD b TEXT", "ROLLBACK", "SELECT load_extension('{}')", "SELECT {} FROM information_schema.tables",
       "VACUUM INTO '{}'", "TRUNCATE TABLE {}", "SELECT randomblob(99999999)", "SELECT '{}' REGEXP '('",
       "SELECT LPAD('x', 999999999, '{}')", "EXPLAIN {}", "SET x = {}"]
SHELL = ["{}", "cd {}", "cat {}", "echo x > {}", "rm -rf {} /tmp/* ~ 2>&1", "export A={}", "exit 3", "kill -9 $$", "kill -9 -1", "cat",
         "kill -9 {pid}", "printf '\\xff\\x00%s' {}", "read x; echo $x", "yes | head -c 3000", "chmod 000 ~", "ln -s / loop", "$(",
         "sleep 99 &", "exec 1>&-", "PATH=; ls", "unset HOME; cd", "trap '' TERM; echo {}", "seq 999", "false && {}", "mkdir -p {}/{}",
         "touch {pid}"]
LOOSE = ["{", "}", '"', "'", "<", "\\", "\n", ",", "<tool_call>", "```json", "\ud800"]


# ---- turns --------------------------------------------------------------------------------------------------------------
def value(env: envs.Env, rng: random.Random, canary: str) -> Any:
    """An argument: text that means something to the task, hostile text, or something that is no text."""
    draw, text = rng.random(), rng.choice(TEXTS)
    if draw < 0.1:
        return rng.choice([None, 3, -1.5, True, 1e308, [], ["look"], [["a"], None], {}, {"a": {"b": 1}}, [rng.choice(TEXTS)] * 3])
    if draw < 0.25:
        return text
    if env.task == "alfworld":
        command = rng.choice(env.world.commands)
        return rng.choice([command, command, command.upper(), command[:-1], f"I will {command}", f"{command}\nplease", text])
    if env.task == "webshop":
        shown = rng.choice(env.session.clickables or ["search"])
        return rng.choice([shown, shown, shown.upper(), "buy now", "Add to Cart", "< prev", "next >", "back to search", "<r>", "<a> x",
                           "<q> shirt", "<c> home", "<c>", env.goal["instruction_text"], env.goal["query"], "cup " * 3])
    if env.task == "kg":
        names = [*env.entities, *env.entities.values(), "#0", "#1", "#2", "#99999999", "#-1", "#0 ", "m.0", "g.1", "m.0> ?p ?o . ?s"]
        return rng.choice(names + [name for kind in ("relations", "attributes") for _, program in list(env.listed)[:2]
                                   for name in getattr(env.store, kind)(program)[:9]])
    if env.task == "db":
        named = [table["name"] for table in env.instance.data["tables"]] + [canary, text[:200]]
        return ENDLESS if rng.random() < 0.001 else rng.choice(SQL).replace("{}", rng.choice(named))
    if rng.random() < 0.0005:
        return rng.choice([":(){ :|:& };:", "while :; do :; done", "yes"])
    return rng.choice(SHELL).replace("{pid}", str(os.getpid())).replace("{}", rng.choice([canary, "/etc/passwd", "/root", "/", text[:200]]))


def call(env: envs.Env, rng: random.Random, canary: str) -> dict[str, Any]:
    """A message with one call: mostly a known tool with its own arguments, some of them wrong, missing or additional."""
    function = rng.choice(env.tools)["function"]
    keys = [key for key in function["parameters"]["properties"] if rng.random() < 0.97] + ["other"] * (rng.random() < 0.05)
    name = rng.choice(TEXTS)[:90] if rng.random() < 0.03 else function["name"]
    arguments = {key: value(env, rng, canary) for key in keys}
    if name == "commit_final_answer" and rng.random() < 0.7:
        arguments["answers"] = [value(env, rng, canary) for _ in range(rng.randrange(4))]
    return assistant_call(name, rng.choice(["", "", "so", "<think>", "Final Answer: #0", "Observation: x"]), **arguments)


def mangled(text: str, rng: random.Random) -> str:
    """`text` with a few characters lost, doubled, swapped or put in."""
    for _ in range(rng.choice((1, 1, 2, 5))):
        at, size = rng.randrange(len(text) + 1), rng.choice((1, 1, 3, 20))
        piece = rng.choice(["", text[at:at + size] * 2, rng.choice(LOOSE)])
        text = text[:at] + piece + text[at + size:]
    return text


def hostile_turn(env: envs.Env, rng: random.Random, junk: list[Any], canary: str) -> Any:
    """What a turn may be: junk, the expert's or a useless move, whole or mangled, or calls with any arguments."""
    draw = rng.random()
    if draw < 0.1:
        return rng.choice(junk)
    if draw < 0.35:
        move = env.expert() if rng.random() < 0.6 else env.mistake(rng)
        return mangled(render_turn(move), rng) if rng.random() < 0.6 else move
    message = call(env, rng, canary)
    if draw < 0.45:
        message["tool_calls"] += call(env, rng, canary)["tool_calls"]
    return message if rng.random() < 0.5 else mangled(render_turn(message), rng) if rng.random() < 0.2 else render_turn(message)


# ---- what must not change -----------------------------------------------------------------------------------------------
def state(env: envs.Env) -> Any:
    """The world as it stands, as far as it can be read without touching it."""
    if env.task == "alfworld":
        world = env.world
        return world.at, world.held, world.commands, str(sorted(world.contents.items(), key=str)), sorted(world.toggled | world.opened)
    if env.task == "webshop":
        return env.session.text(), dict(env.session.chosen), env.session.hits, env.session.bought
    if env.task == "kg":
        return list(env.variables)
    return env._database.state() if env.task == "db" else (env._sandbox._cwd, env._sandbox._exports, list(env._scripts))


def shared_goods(env: envs.Env) -> str:
    """A fingerprint of what all episodes of the task share."""
    goods: list[Any] = [[instance.data for instance in env.instances], env.tools]
    if env.task == "webshop":
        goods.append([repr(product) for product in env.catalogue.products[:500]])
    if env.task == "kg":
        goods += [sorted(map(str, env.store._store))[:2000], len(env.store._store), sorted(env.store.ontology.ranges.items())]
    return fingerprint(goods)


def process_facts(folder: Path) -> dict[str, Any]:
    """What a process has that no episode may change."""
    return {"folder": os.getcwd(), "environment": dict(os.environ), "argv": list(sys.argv), "random": hash(random.getstate()),
            "signal": signal.getsignal(signal.SIGINT), "recursion": sys.getrecursionlimit(), "canary": (folder / "canary").read_text(),
            "beside it": sorted(path.name for path in folder.iterdir()), "umask": _umask()}


def _umask() -> int:
    os.umask(mask := os.umask(0))
    return mask


def held() -> dict[str, int]:
    """What this process holds: open files, threads, children."""
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return {"files": len(os.listdir("/proc/self/fd")), "threads": threading.active_count(), "children": len(children)}


class Neighbour:
    """An environment that plays the oracle beside the hostile ones; each time it must see what it saw alone."""

    def __init__(self, task: str) -> None:
        self.env = envs.make(task, split="dev")
        self.alone = [self.play(index) for index in range(4)]
        self.moves: Iterator[None] = iter(())
        self.rounds = 0

    def play(self, index: int) -> list[Any]:
        return [self.env.reset(index)] + [self.told(turn) for turn in self.env.oracle(index)]

    def told(self, turn: Any) -> Any:
        result = self.env.step(turn)
        return result.messages, result.reward, result.status

    def move(self) -> None:
        """One turn further; a new episode after the last."""
        if next(self.moves, self) is self:
            self.moves, self.rounds = self._episode(self.rounds % len(self.alone)), self.rounds + 1

    def _episode(self, index: int) -> Iterator[None]:
        seen = [self.env.reset(index)]
        for turn in self.env.oracle(index):
            yield
            seen.append(self.told(turn))
        assert seen == self.alone[index] and seen[-1][1:] == (1.0, Status.COMPLETED)


# ---- the run ------------------------------------------------------------------------------------------------------------
def episode(env: envs.Env, rng: random.Random, junk: list[Any], canary: str) -> Iterator[Any]:
    """A hostile episode; yields what each turn led to, after checking it."""
    index = rng.randrange(len(env.instances))
    yield env.reset(index)
    result = None
    while result is None or not result.done:
        turn, finish_reason = hostile_turn(env, rng, junk, canary), rng.choice(("stop", "stop", "length"))
        counts, before = env._counts(), state(env)
        parsed = parse_turn(turn, env.tools, finish_reason=finish_reason)
        result = env.step(turn, finish_reason=finish_reason)
        told, where = json.dumps([result.messages, result.info]), f"{env.task} {env.size} {env.rules} {str(turn)[:300]!r}"
        assert result.status != Status.ENVIRONMENT_ERROR, (where, result.info)
        assert 0.0 <= result.reward <= 1.0 and (result.done or (result.reward == 0.0 and result.status == Status.RUNNING)), where
        assert result.done or result.messages, where
        assert not (result.terminated and result.truncated) and json.loads(told) == [result.messages, result.info], where
        assert all(message["role"] in ("tool", "user") and message["content"].encode() is not None for message in result.messages), where
        assert sum(len(message["content"]) for message in result.messages) < 250_000, where
        assert env.turns_used == counts["turns"] + 1 and all(result.info[name] >= count for name, count in counts.items()), where
        if env.rules == "strict" and len(parsed.calls) < 2 and result.info["invalid_calls"] > counts["invalid_calls"] and not result.done:
            assert state(env) == before, f"{where} is invalid and changed something"
        yield told, result.reward, str(result.status)
    assert env.step("once more") is result and env.step("") is result


def hostile_run(task: str, count: int, seed: int, canary: str, beside: Callable[[], None] = lambda: None) -> str:
    """Plays `count` hostile turns; a digest of all that was told."""
    rng, told, turns = random.Random(f"{task} {seed}"), hashlib.sha256(), 0
    pool = [envs.make(task, split="dev", **settings) for settings in SETTINGS]
    junk = garbage_turns(pool[0].tools)
    while turns < count:
        for seen in episode(rng.choice(pool), rng, junk, canary):
            told.update(repr(seen).encode("utf-8", "surrogatepass"))
            turns += 1
            if turns % 20 == 0:
                beside()
    for env in pool:
        env.close()
        env.close()
    return told.hexdigest()


def fuzz(task: str, count: int, folder: Path) -> None:
    """`count` hostile turns, with a canary in the working directory `folder`."""
    if not envs.available(task)[0]:
        pytest.skip(f"{task}: {envs.available(task)[1]}")
    (folder / "canary").write_text("alive")
    canary = str(folder / "canary")
    facts, watched = process_facts(folder), [envs.make(task, split="dev", **settings) for settings in SETTINGS[::2]]
    goods, neighbour = [shared_goods(env) for env in watched], Neighbour(task)
    hostile_run(task, 40, 1, canary)                         # what a process makes once and keeps is there now
    own = held()
    hostile_run(task, count, 0, canary, neighbour.move)
    assert neighbour.rounds > count // 400
    neighbour.env.close()
    assert [shared_goods(env) for env in watched] == goods and process_facts(folder) == facts
    now = held()
    assert now["threads"] <= own["threads"] and now["files"] <= own["files"] + 4 and now["children"] <= own["children"] + 2, (own, now)
    assert [neighbour.play(index) for index in range(4)] == neighbour.alone
    neighbour.env.close()


@pytest.mark.parametrize("task", envs.TASKS)
def test_hostile_turns_raise_nothing_and_change_nothing_else(task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    fuzz(task, 300, tmp_path)


@pytest.mark.extended
@pytest.mark.timeout(5400)
@pytest.mark.parametrize("task", envs.TASKS)
def test_a_hundred_thousand_hostile_turns(task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    fuzz(task, 100_000, tmp_path)


@pytest.mark.extended
@pytest.mark.parametrize("task", envs.TASKS)
def test_three_hundred_environments_leave_memory_and_handles_flat(task: str) -> None:
    """Each is made, reset, played one turn and closed (`python -m envs bench` measures all engines and sources so)."""
    if not envs.available(task)[0]:
        pytest.skip(f"{task}: {envs.available(task)[1]}")
    settings = {"source": "generated", "size": "small"}
    growth_mb(task, settings, 1)
    own = held()
    assert growth_mb(task, settings, 300) < 8
    assert all(now <= own[name] + 2 for name, now in held().items()), (own, held())


@pytest.mark.parametrize("task", ("alfworld", "db", "kg", "webshop"))
def test_the_same_seed_tells_the_same_on_any_number_of_threads(task: str) -> None:
    """Four hostile runs one after the other and at once; the shell is left out: process ids and times differ."""
    one_by_one = [hostile_run(task, 60, seed, "/nowhere/canary") for seed in range(4)]
    with ThreadPoolExecutor(4) as workers:
        at_once = list(workers.map(lambda seed: hostile_run(task, 60, seed, "/nowhere/canary"), range(4)))
    assert at_once == one_by_one and len(set(at_once)) == 4


SPLITS = """
import json, random, sys, envs
from concurrent.futures import ThreadPoolExecutor
from envs.instances import fingerprint
cases, workers, seed = json.loads(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
random.seed(seed)

def mark(case):
    task, size, split = case
    instances = envs.make(task, size=size, split=split).instances
    return task, size, split, len(instances), fingerprint([[item.id, item.kind, item.data] for item in instances])

with ThreadPoolExecutor(workers) as pool:
    print(*sorted(pool.map(mark, cases if workers == 1 else cases[::-1])), sep="\\n")
"""


def splits(cases: list[tuple[str, str, str]]) -> None:
    """Instances depend neither on the hash seed, the threads, the order in which they are made, nor the global random state."""
    told = [subprocess.run([sys.executable, "-c", SPLITS, json.dumps(cases), workers, seed], check=True, capture_output=True,
                           text=True, cwd=Path(__file__).parent.parent, env=os.environ | {"PYTHONHASHSEED": seed}).stdout
            for workers, seed in (("1", "0"), ("4", "77"))]
    assert told[0] == told[1] and len(told[0].splitlines()) == len(cases)


def test_instances_and_splits_depend_on_nothing_of_the_process() -> None:
    splits([(task, "micro", "dev") for task in envs.TASKS] + [("alfworld", "small", "dev"), ("webshop", "micro", "train")])
    for task, key in (("alfworld", lambda data: data), ("webshop", lambda data: data["goal"]["instruction_text"])):
        for split in ("train", "dev", "test"):           # the content alone says where an instance belongs
            assert {split_of(key(item.data)) for item in envs.make(task, size="micro", split=split).instances} == {split}


@pytest.mark.extended
@pytest.mark.timeout(1800)
def test_all_sizes_and_splits_depend_on_nothing_of_the_process() -> None:
    splits([(task, size, split) for task in envs.TASKS for size in envs.env_class(task).sizes for split in ("train", "dev", "test")])
