"""The household environment: contract, rules of both modes, generated and official games, hostile input."""

import json
import random
import time

import pytest

import envs
from envs.alfworld_env import ALFWorldEnv
from envs.alfworld_env.engine import Engine
from envs.alfworld_env.expert import plan
from envs.alfworld_env.game import TASK_TYPES, goal_sentence, load_game, parse_problem, to_pddl, wording_of
from envs.alfworld_env.generate import draw_room, household
from envs.alfworld_env.text import Official
from envs.alfworld_env.textworld_engine import missing
from envs.base import EnvFault, Status, assistant_call
from envs.check import check_env
from envs.tool_calls import render_turn

OLD_GRAMMAR = ('"rhs": "You arrive at {lend.name}. #x#" put {o} in/on {r} '
               '"rhs": "Your task is to: %s"')


def act(env, action):
    return env.step(assistant_call("take_action", action=action))


@pytest.fixture(scope="module")
def micro():
    return envs.make("alfworld")


@pytest.fixture(scope="module")
def small():
    return envs.make("alfworld", size="small")


@pytest.fixture(scope="module")
def literal():
    return envs.make("alfworld", size="small", split="dev", rules="agentbench")


def test_contract_of_an_environment():
    check_env("alfworld", sizes=("micro", "small"), sample=6)
    check_env("alfworld", sizes=("small",), splits=("dev",), sample=6, rules="agentbench")


# ---- micro --------------------------------------------------------------------------------------------------------------
def test_micro_is_short_and_solved_in_three_to_seven_commands(micro):
    chars, turns, hidden = [], [], 0
    for index in range(len(micro.instances)):
        opening = micro.reset(index)
        system, user = (len(message["content"].split()) for message in opening)
        assert system <= 12 and user <= 25
        hidden += micro.world.goal.object not in opening[1]["content"].split("; at ")[0]
        count = sum(len(message["content"]) for message in opening)
        while True:
            message = micro.expert()
            result = micro.step(message)
            assert all(len(told["content"]) <= 120 for told in result.messages)
            count += len(render_turn(message)) + sum(len(told["content"]) for told in result.messages)
            if result.done:
                break
        assert result.reward == 1 and 3 <= result.info["turns"] <= 7
        chars.append(count)
        turns.append(result.info["turns"])
    assert sum(chars) / len(chars) < 570 and max(chars) < 860
    assert set(turns) == {3, 4, 5, 6, 7}
    assert 0.1 < hidden / len(turns) < 0.35                 # the object is behind a door: its number must be read


def test_micro_offers_at_most_twelve_commands_whatever_is_done(micro):
    rng, most = random.Random(0), 0
    for index in range(120):
        micro.reset(index)
        for _ in range(40):
            micro.world.step(rng.choice(micro.world.commands))
            most = max(most, len(micro.world.commands))
    assert most <= 12


def test_micro_world_told_in_words(micro):
    assert [message["content"] for message in micro.reset(0)] == \
        ["house: one action a turn.", "fridge1 closed; shelf1; table1: knife1, watch1; at door; put watch in shelf"]
    actions = ("take watch1 from table1", "go to table1", "take watch2 from table1", "take watch1 from table1", "go to shelf1", "inventory")
    told = [act(micro, action).messages[0]["content"] for action in actions]
    assert told == ["nothing happens", "knife1, watch1", "nothing happens", "ok", "empty", "hold watch1"]
    result = act(micro, "put watch1 in shelf1")             # the other form of the put command means the same
    assert (result.reward, result.status) == (1.0, Status.COMPLETED)
    assert [result.info[key] for key in ("wording", "turns", "invalid_calls")] == ["brief", 7, 2]


def test_all_six_kinds_in_all_sizes():
    for size in ("micro", "small", "full"):
        env = envs.make("alfworld", size=size, split="dev")
        assert {instance.kind for instance in env.instances} == set(TASK_TYPES)
        assert all(3 <= len(env.oracle(index)) <= env.max_turns - 1 for index in range(len(env.instances)))


# ---- rules --------------------------------------------------------------------------------------------------------------
def test_strict_answers_an_invalid_action_with_nothing_happens(small):
    small.reset(0)
    before = small.world.commands
    result = act(small, "fly to the moon")
    assert result.messages[0]["content"].startswith("Nothing happens. AVAILABLE ACTIONS: ")
    assert result.info["invalid_calls"] == 1 and small.world.commands == before and not result.done


def test_both_put_forms_act_and_every_listed_command_works(small):
    """S45 and S46: the other release's form is translated; nothing that is listed leads to "Nothing happens."."""
    rng = random.Random(1)
    for index in range(6):
        small.reset(index)
        for _ in range(30):
            assert small.world.step(rng.choice(small.world.commands)) != "Nothing happens."
    for form in ("put {0} in/on {1}", "put {0} on {1}", "move {0} to {1}", "Put {0}  in {1}"):
        small.reset(0)
        while not small.expert()["tool_calls"][0]["function"]["arguments"]["action"].startswith("move "):
            small.step(small.expert())
        last = small.expert()["tool_calls"][0]["function"]["arguments"]["action"].removeprefix("move ").split(" to ")
        assert act(small, form.format(*last)).reward == 1


def test_the_step_limit_is_not_a_success_and_a_finished_game_repeats_its_end(small):
    small.reset(3)
    for _ in range(20):
        result = act(small, "look")
    assert (result.reward, result.truncated, result.status) == (0.0, True, Status.TASK_LIMIT)
    assert act(small, "inventory") is result
    small.reset(3)
    while not (result := small.step(small.expert())).done:
        pass
    assert result.reward == 1 and act(small, "look") is result and result.status == Status.COMPLETED


def test_a_million_characters_are_read_in_no_time(small, literal):
    for text in ("x" * 1_000_000, "go to " * 170_000, "put a 1 in " * 90_000, "put a " + "1" * 1_000_000, "\n" * 1_000_000):
        for env in (small, literal):
            env.reset(0)
            before, start = env.world.commands, time.process_time()
            result = act(env, text)
            assert time.process_time() - start < 2 and len(result.messages[0]["content"]) < 5000
            if env is small:
                assert env.world.commands == before and result.info["invalid_calls"] == 1


def test_agentbench_maps_free_text_by_bleu(literal):
    literal.reset(0)
    place = next(command for command in literal.world.commands if command.startswith("go to"))
    told = act(literal, f"I will {place}\nbecause").messages[0]["content"]
    assert told.startswith(f"You arrive at {place.removeprefix('go to ')}. ")
    assert act(literal, "zzz").messages[0]["content"].startswith("Nothing happens.")
    told = literal.step(assistant_call("anything", whatever="INVENTORY")).messages[0]["content"]
    assert told.startswith("You are not carrying anything.")


def test_agentbench_ends_after_three_identical_actions_from_the_fourth_step_on(literal):
    literal.reset(0)
    results = [act(literal, "look") for _ in range(4)]
    assert [result.done for result in results] == [False, False, False, True]
    assert (results[-1].status, results[-1].reward) == (Status.INVALID_ACTION, 0.0)
    literal.reset(0)
    assert not any(act(literal, action).done for action in ("look", "look", "inventory", "look", "look", "help"))


def test_agentbench_statuses_stick(literal):
    for turn, status in (("no call here", Status.VALIDATION_FAILED),
                         (assistant_call("take_action"), Status.INVALID_ACTION),
                         ({"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "take_action",
                           "arguments": {"action": ["look"]}}}]}, Status.INVALID_ACTION)):
        literal.reset(1)
        first = literal.step(turn)
        assert first.messages[0]["role"] == "user" and not first.done
        while not (result := literal.step(literal.expert())).done:
            pass
        assert (result.status, result.reward) == (status, 1.0)


def test_strict_ignores_what_agentbench_marks(small):
    small.reset(1)
    small.step("no call here")
    small.step(assistant_call("take_action"))
    while not (result := small.step(small.expert())).done:
        pass
    assert (result.status, result.reward, result.info["invalid_calls"]) == (Status.COMPLETED, 1.0, 2)


# ---- official games -----------------------------------------------------------------------------------------------------
def write_game(root, folder, data, **changes):
    """A game file in the official form, made of one of our own households."""
    path = root / "json_2.1.1" / folder / "trial_1" / "game.tw-pddl"
    path.parent.mkdir(parents=True)
    game = {"pddl_domain": "", "grammar": OLD_GRAMMAR % data["task"], "pddl_problem": to_pddl(household(data)),
            "solvable": True, **changes}
    path.write_text(json.dumps(game) if "raw" not in changes else changes["raw"])
    return path.relative_to(root).as_posix()


@pytest.fixture
def official(tmp_path):
    root, names = tmp_path / "alfworld", []
    for index in range(6):
        kind, data = draw_room(random.Random(f"official {index}"), index, "small")
        names.append(write_game(root, f"valid_seen/{kind}-Thing-None-Place-{index}", data))
    write_game(root, "valid_seen/pick_and_place_simple-A-None-B-7", data)                       # another kind than it says
    write_game(root, "valid_seen/look_at_obj_in_light-A-None-B-8", data, solvable=False)
    write_game(root, "valid_seen/look_at_obj_in_light-A-None-B-9", data, raw="{not json")
    write_game(root, "valid_seen/look_at_obj_in_light-A-None-C-9", data, grammar='"rhs": "{__import__(\'os\').getcwd()}"')
    write_game(root, "valid_seen/look_at_obj_in_light-A-None-D-9", data, pddl_problem="(:init (flies a)) (:goal x)")
    write_game(root, "valid_seen/do_magic-A-None-D-9", data)
    gone = "json_2.1.1/train/look_at_obj_in_light-A-None-B-1/gone/game.tw-pddl"
    (root / "train_valid.json").write_text(json.dumps({"any": [names[1], gone, names[0]]}))
    return tmp_path


def test_official_folder_loads_and_names_what_it_skips(official):
    env = envs.make("alfworld", source="official", split="dev", path=str(official), rules="agentbench")
    assert [instance.kind for instance in env.instances] == sorted(TASK_TYPES) and env.max_turns == 20
    reasons = dict(env.skipped)
    assert len(reasons) == 6
    assert sorted(reason[:24] for reason in reasons.values()) == sorted(reason[:24] for reason in (
        "the goal is of type pick_two", "marked as not solvable", "Expecting property name enclosed",
        "the grammar has no goal sentence", "unknown fact (flies a) in the initial state", "'json_2.1.1/valid_seen/do_magic"))
    for index in range(6):
        opening = env.reset(index)[1]["content"]
        assert opening.startswith("Here is your task. You are in the middle of a room.") and "Welcome" not in opening
        for turn in env.oracle(index):
            result = env.step(turn)
            assert "arrive at loc" not in result.messages[0]["content"]
        assert result.reward == 1 and result.info["wording"] == "old"
    listed = envs.make("alfworld", source="official", split="train", path=str(official))
    assert [instance.kind for instance in listed.instances] == [TASK_TYPES[1], TASK_TYPES[0]]   # the list's order
    assert [reason for _, reason in listed.skipped] == ["file is missing"]
    with pytest.raises(EnvFault, match="no usable game of split 'test'"):
        envs.make("alfworld", source="official", split="test", path=str(official))
    with pytest.raises(EnvFault, match="no official games"):
        envs.make("alfworld", source="official", path=str(official / "nowhere"))


def test_a_game_file_is_never_code():
    for text in ('"rhs": "Your task is to: {__import__(\'os\')}."', '"rhs": "Your task is to: [x|y]."', "nothing"):
        with pytest.raises(ValueError, match="goal sentence"):
            goal_sentence(text)
    with pytest.raises(ValueError, match="neither known format"):
        wording_of("put {o} in/on {r} move {o} to {r}")
    good = to_pddl(household(draw_room(random.Random(0), 0, "small")[1]))
    for broken, message in ((good.replace("(:goal", "(:aim"), "no .:init"),
                            (good.replace("(:init", "(:init (= 3 4)"), "more than plain facts"),
                            (good.replace("(exists (?r", "(forall (?r", 1), "none of the six"),
                            (good.replace("(:init", "(:init (atlocation agent1 loc_bar_9)"), "exactly one location"),
                            (good.replace("(:init", "(:init (inreceptacle cup_bar_1 box_bar_7)"), "box_bar_7, which is at no location"),
                            (good.replace("(:init", "(:init (openable caf\u00e9_bar_1)"), "more than plain facts")):
        with pytest.raises(ValueError, match=message):
            parse_problem(broken)


def test_real_official_games_are_solved(eppo_data):
    paths = sorted(eppo_data("alfworld/games").glob("json_2.1.*/valid_seen/*/*/game.tw-pddl"))
    solved = []
    for path in paths:
        try:
            game = load_game(path)
        except ValueError as error:
            assert str(error) == "marked as not solvable"
            continue
        commands = plan(Engine(game.problem, game.task, Official(game.wording)))
        solved.append(len(commands))
    assert len(solved) >= 20 and all(0 < count <= 19 for count in solved)


# ---- settings ----------------------------------------------------------------------------------------------------------
def test_unknown_settings_are_named():
    with pytest.raises(ValueError, match="did you mean 'textworld'"):
        envs.make("alfworld", backend="textwrld")
    with pytest.raises(ValueError, match="did you mean 'strict'"):
        ALFWorldEnv(rules="strikt")
    assert envs.available("alfworld") == envs.available("alfworld", "own") == (True, "")
    assert envs.available("alfworld", "textwrld") == (False, "unknown alfworld backend 'textwrld'; known: own, textworld")
    ok, reason = envs.available("alfworld", backend="textworld")
    assert ok == (not missing()) and reason == missing()
    if not ok:
        with pytest.raises(EnvFault, match="pip install alfworld"):
            envs.make("alfworld", size="small", backend="textworld")
