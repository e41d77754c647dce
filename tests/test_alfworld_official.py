"""Official ALFWorld games: lines of `.jsonl` files beside game files, what cannot be used, and what both rules make of a turn."""

import gc
import json
import random
import re
import weakref
from statistics import median

import pytest

import envs
from envs.alfworld_env import textworld_engine
from envs.alfworld_env.engine import Engine
from envs.alfworld_env.game import TASK_TYPES, to_pddl
from envs.alfworld_env.generate import draw_room, household
from envs.alfworld_env.official import library
from envs.alfworld_env.text import Official
from envs.base import EnvFault, Status, assistant_call
from envs.check import check_env


def record(index, folder="train", **changes):
    kind, data = draw_room(random.Random(f"line {index}"), index, "small")
    name = f"json_2.1.1/{folder}/{kind}-Thing-None-Place-{index}/trial_1/game.tw-pddl"
    return {"game": name, "task": data["task"], "walkthrough": ["move a 1 to b 2"], "solvable": True,
            "pddl_problem": to_pddl(household(data)), **changes}


def write_lines(folder, records, name="games.jsonl"):
    folder.mkdir(exist_ok=True)
    text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in records)
    if name.endswith(".zst"):
        zstandard = pytest.importorskip("zstandard")
        (folder / name).write_bytes(zstandard.compress(text.encode()))
    else:
        (folder / name).write_text(text)


def act(env, action):
    return env.step(assistant_call("take_action", action=action))


# ---- lines of .jsonl files ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ("games.jsonl", "games.jsonl.zst"))
def test_lines_are_games_of_the_folder_they_name(tmp_path, name):
    lines = [record(index) for index in range(6)] + [record(6, "valid_seen"), record(7, solvable=False),
                                                     record(8, task="look at {x}."), record(9, pddl_problem=3)]
    write_lines(tmp_path / "alfworld", lines, name)
    env = envs.make("alfworld", source="official", split="train", path=str(tmp_path), rules="agentbench")
    assert sorted(instance.kind for instance in env.instances) == sorted(TASK_TYPES)
    assert sorted(reason for _, reason in env.skipped) == \
        ["marked as not solvable", "not a plain goal sentence: 'look at {x}.'", "the record has no text under 'pddl_problem'"]
    for index in range(6):
        env.reset(index)
        for turn in env.oracle(index):
            result = env.step(turn)
        assert result.reward == 1 and result.info["wording"] == "old"
    assert env._game(env.instances[0]).walkthrough == ["put a 1 in/on b 2"]
    again = envs.make("alfworld", source="official", split="train", path=str(tmp_path))
    assert again.skipped == env.skipped and again.reset(0)[1] == env.reset(0)[1]
    assert len(envs.make("alfworld", source="official", split="dev", path=str(tmp_path)).instances) == 1


def test_agentbenchs_list_orders_lines_and_names_those_missing(tmp_path):
    lines = [record(index) for index in range(3)]
    write_lines(tmp_path / "alfworld", lines)
    (tmp_path / "alfworld" / "train_valid.json").write_text(json.dumps(
        {"b": [lines[2]["game"], lines[0]["game"].replace("trial_1", "trial_2")], "a": [lines[0]["game"]]}))
    env = envs.make("alfworld", source="official", split="train", path=str(tmp_path))
    assert [instance.data["game"] for instance in env.instances] == [lines[2]["game"], lines[0]["game"]]
    assert [reason for _, reason in env.skipped] == ["file is missing"]


def test_a_game_that_is_listed_twice_is_one_instance(tmp_path):
    lines = [record(index) for index in range(2)]
    write_lines(tmp_path / "alfworld", lines)
    names = [lines[1]["game"], lines[0]["game"], lines[1]["game"]]
    (tmp_path / "alfworld" / "train_valid.json").write_text(json.dumps({"a": names}))
    env = envs.make("alfworld", source="official", split="train", path=str(tmp_path))
    assert [instance.data["game"] for instance in env.instances] == names[:2]
    assert env.skipped == [(names[2], "listed twice")]


def test_the_file_wins_over_the_line(tmp_path):
    line = record(0, "valid_seen")
    write_lines(tmp_path / "alfworld", [line])
    path = tmp_path / "alfworld" / line["game"]
    path.parent.mkdir(parents=True)
    path.write_text("{")
    with pytest.raises(EnvFault, match="no usable game"):
        envs.make("alfworld", source="official", split="dev", path=str(tmp_path))


def test_lines_that_hold_no_game_are_listed(tmp_path):
    """In every split; a game's second line in the game's own."""
    lines = [record(0), "{", "[" * 100_000, "[]", '{"x": 1}', '{"game": ["a"]}', '{"game": "../../etc/passwd"}', "",
             record(0, task="another one."), record(1, walkthrough=[3]), record(2, "valid_seen"), record(3, task="\ud800")]
    write_lines(tmp_path / "alfworld", lines)
    train, dev = (envs.make("alfworld", source="official", split=split, path=str(tmp_path)) for split in ("train", "dev"))
    assert len(train.instances) == len(dev.instances) == 1 and train.reset(0)[1]["content"].count(lines[0]["task"]) == 1
    assert [place for place, _ in dev.skipped] == [f"games.jsonl, line {number}" for number in range(2, 8)]
    for (_, reason), start in zip(dev.skipped, ("Expecting property", "nested too deeply", *["no record of a game: "] * 4)):
        assert reason.startswith(start)
    own = dict(item for item in train.skipped if item not in dev.skipped)
    assert own == {"games.jsonl, line 9": f"an earlier line has {lines[0]['game']}",
                   lines[9]["game"]: "the walkthrough is not a list of commands",
                   lines[11]["game"]: "not a plain goal sentence: '\\ud800'"}


def test_damaged_files_are_named(tmp_path):
    pytest.importorskip("zstandard")
    write_lines(tmp_path / "alfworld", [record(0)], "games.jsonl.zst")
    whole = (tmp_path / "alfworld" / "games.jsonl.zst").read_bytes()
    for broken in (b"no zstandard" + whole, whole[:20] + b"\xff\xff" + whole[22:]):
        (tmp_path / "alfworld" / "games.jsonl.zst").write_bytes(broken)
        with pytest.raises(EnvFault, match="games.jsonl.zst, line 1"):
            envs.make("alfworld", source="official", split="train", path=str(tmp_path))
    (tmp_path / "alfworld" / "games.jsonl.zst").unlink()
    for text in ("{", "[]", '{"a": 3}', '{"a": [3]}', "[" * 100_000):
        (tmp_path / "alfworld" / "train_valid.json").write_text(text)
        with pytest.raises(EnvFault, match="train_valid.json"):
            library(str(tmp_path))._load("train")


def test_a_game_that_vanishes_is_a_fault_of_the_environment(tmp_path):
    line = record(0, "valid_seen")
    path = tmp_path / "alfworld" / line["game"]
    path.parent.mkdir(parents=True)
    grammar = '"rhs": "You arrive at {lend.name}. #x#" put {o} in/on {r} "rhs": "Your task is to: ' + line["task"] + '"'
    path.write_text(json.dumps(line | {"grammar": grammar}))
    env = envs.make("alfworld", source="official", split="dev", path=str(tmp_path))
    env.reset(0)
    path.unlink()
    with pytest.raises(EnvFault, match="game.tw-pddl"):
        env.reset(0)


def test_the_shared_training_games_can_be_used(eppo_data):
    """2,714 of the 3,150 games of AgentBench's list are there; a sample is solved in the old format."""
    folder = eppo_data("alfworld/train_valid.json").parent.parent
    pytest.importorskip("zstandard")
    env = envs.make("alfworld", source="official", split="train", path=str(folder), rules="agentbench")
    assert len(env.instances) == 2714 and len(env.skipped) == 436
    assert {reason for _, reason in env.skipped} == {"file is missing"}
    for index in range(0, 2714, 90):
        game = env._game(env.instances[index])
        world = Engine(game.problem, game.task, Official(game.wording))
        for command in game.walkthrough:
            assert command in world.commands
            world.step(command)
        assert world.won
    with pytest.raises(EnvFault, match="20 skipped; the first, .*marked as not solvable"):
        envs.make("alfworld", source="official", split="test", path=str(folder))


@pytest.mark.extended
def test_contract_holds_on_official_games(eppo_data):
    folder = eppo_data("alfworld/train_valid.json").parent.parent
    for rules in ("strict", "agentbench"):
        check_env("alfworld", source="official", splits=("dev",), sample=12, rules=rules, path=str(folder))


@pytest.mark.extended
def test_the_oracle_solves_every_official_game(eppo_data):
    folder = eppo_data("alfworld/train_valid.json").parent.parent
    for split in ("train", "dev"):
        env = envs.make("alfworld", source="official", split=split, path=str(folder), rules="agentbench")
        short = []
        for index, instance in enumerate(env.instances):
            env.reset(index)
            for turn in env.oracle(index):
                result = env.step(turn)
            if result.reward != 1 or result.status != Status.COMPLETED:
                short.append(instance.id)
        assert short == []


# ---- closed holes, both verdicts ----------------------------------------------------------------------------------------
def test_closed_holes_show_both_verdicts():
    """What agentbench does with a turn, and what strict rules do with the same one."""
    literal, strict = (envs.make("alfworld", size="small", split="dev", rules=rules) for rules in ("agentbench", "strict"))
    place = next(command for command in literal.reset(0) and literal.world.commands if command.startswith("go to"))
    strict.reset(0)
    free = f"I will now {place} please"
    assert act(literal, free).messages[0]["content"].startswith("You arrive at") and literal.invalid_calls == 0
    assert act(strict, free).messages[0]["content"].startswith("Nothing happens.") and strict.invalid_calls == 1
    for env, ended in ((literal, Status.INVALID_ACTION), (strict, Status.RUNNING)):
        env.reset(0)
        for _ in range(4):
            result = act(env, "look")
        assert result.status == ended, "three identical actions from the fourth step on"
    for turn, marked in (("no call", Status.VALIDATION_FAILED), (assistant_call("take_action"), Status.INVALID_ACTION)):
        for env, ended in ((literal, marked), (strict, Status.COMPLETED)):
            env.reset(1)
            env.step(turn)
            while not (result := env.step(env.expert())).done:
                pass
            assert (result.status, result.reward) == (ended, 1.0)
    for env, told in ((literal, "You are not carrying"), (strict, "Error: ")):
        env.reset(0)
        assert env.step(assistant_call("any_name", whatever="inventory")).messages[0]["content"].startswith(told)


# ---- engines are kept, memory is flat -----------------------------------------------------------------------------------
def test_engines_go_back_to_the_pool(monkeypatch):
    class Fake:
        pass

    monkeypatch.setattr(textworld_engine, "TextWorldEngine", Fake)
    monkeypatch.setattr(textworld_engine, "_idle", [])
    first, second = textworld_engine.borrow(), textworld_engine.borrow()
    assert first is not second
    textworld_engine.give_back(first)
    assert textworld_engine.borrow() is first


def test_a_closed_environment_needs_a_reset():
    env = envs.make("alfworld", split="dev")
    opening = env.reset(0)
    env.close()
    env.close()
    with pytest.raises(RuntimeError, match="call reset"):
        act(env, "look")
    assert env.reset(0) == opening and re.match("house", opening[0]["content"])
    household = weakref.ref(env.world)
    env.close()
    gc.collect()
    assert household() is None


def test_full_size_is_as_hard_as_the_official_games():
    """Official training games, one in twenty: median plan 6, receptacles 20, objects 28, commands 22 (95 %: 9, 41, 54, 43)."""
    env = envs.make("alfworld", size="full", split="dev")
    plans, receptacles, objects, commands = [], [], [], []
    for index, instance in enumerate(env.instances):
        world = env._world(instance)
        plans.append(len(env.oracle(index)))
        receptacles.append(len(world.house.receptacles))
        objects.append(sum(map(len, world.contents.values())))
        commands.append(len(world.commands))
    assert median(plans) == 6 and 7 <= sorted(plans)[94] <= 10
    assert 16 <= median(receptacles) <= 25 and 23 <= median(objects) <= 38 and 18 <= median(commands) <= 28
