"""Our household engine against TextWorld: texts, admissible commands, scores and endings, byte for byte.

The default part replays transcripts that TextWorld produced on games of our own generator (`tests/data/alfworld_golden.json`).
The extended part plays both engines side by side on official games; it needs TextWorld (pip install alfworld) and EPPO_DATA.
Record the transcripts again, where TextWorld is installed:  python tests/test_alfworld_parity.py record
"""

import hashlib
import io
import json
import random
import re
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import envs
from envs.alfworld_env.engine import Engine
from envs.alfworld_env.expert import next_command
from envs.alfworld_env.game import TASK_TYPES, load_game, parse_problem, to_pddl
from envs.alfworld_env.generate import draw_room, household
from envs.alfworld_env.text import Official
from envs.alfworld_env.textworld_engine import TextWorldEngine, missing
from envs.base import assistant_call
from envs.commands.bench import memory_mb

GOLDEN = Path(__file__).parent / "data" / "alfworld_golden.json"
WRONG = ("", "look around", "go to nowhere 1", "GO TO desk 1", "take cup 9 from desk 9", "put cup 1 in/on desk 1", "open")


TOOLS = ("go to microwave", "go to fridge", "go to sinkbasin", "take knife", "take butterknife")
SHAPES = frozenset("You arrive open close pick put move heat cool clean sliced turn hot cold carrying: not facing This is "
                   "normal on. There's nothing special Nothing happens. Available On The closed. and".split())
RARE = {"You sliced", "You heat", "You cool", "You clean", "You turn", "You close", "This is hot and", "This is cool and",
        "This is clean", "This is normal", "This is cold", "This is hot", "beside"}
WEIGHTS = {"go": 6, "take": 4, "open": 4, "heat": 6, "cool": 6, "clean": 6, "slice": 9, "use": 3, "move": 2, "put": 2}


def choose(world, mode, rng):
    """The next command of a walk: "expert" (one in five replaced), or "random", which draws the verb before the command."""
    if mode == "expert" and rng.random() > 0.2:
        return next_command(world) or "look"
    if rng.random() < 0.03:
        return rng.choice(WRONG)
    verbs = sorted({command.split()[0] for command in world.commands})
    verb = rng.choices(verbs, [WEIGHTS.get(verb, 1) for verb in verbs])[0]
    choices = [command for command in world.commands if command.split()[0] == verb]
    tools = [command for command in choices if command.startswith(TOOLS)]
    return rng.choice(tools if tools and rng.random() < 0.4 else choices)


def same(reference, world, theirs, ours, command):
    """Fail unless both engines tell the same and stand the same."""
    assert theirs == ours, f"after {command!r}: {theirs!r} and {ours!r}"
    assert reference.commands == world.commands, f"after {command!r}: {set(reference.commands) ^ set(world.commands)}"
    assert reference.won == world.won, f"after {command!r}: won {reference.won} and {world.won}"


def side_by_side(reference, world, walkthrough, seed, steps, seen):
    """Play a walkthrough, an expert walk and a random walk with both engines; (steps, reference seconds, own seconds).
    `seen` counts the shapes of the texts that came back."""
    rng, count, spent, own = random.Random(seed), 0, 0.0, 0.0
    for mode, length in (("walkthrough", len(walkthrough)), ("expert", steps // 4), ("random", steps)):
        same(reference, world, reference.reset(), world.reset(), "reset")
        for number in range(length):
            command = walkthrough[number] if mode == "walkthrough" else choose(world, mode, rng)
            start = time.perf_counter()
            theirs = reference.step(command)
            middle = time.perf_counter()
            ours = world.step(command)
            own += time.perf_counter() - middle
            spent += middle - start
            same(reference, world, theirs, ours, command)
            seen[" ".join(word for word in ours.split()[:5] if word in SHAPES)] += 1
            seen["beside"] += "Next to it, you see a" in ours
            count += 1
        assert mode != "walkthrough" or not walkthrough or world.won
    return count, spent, own


def digest(commands):
    return hashlib.sha256("\n".join(commands).encode()).hexdigest()[:16]


# ---- default: recorded transcripts --------------------------------------------------------------------------------------
def test_recorded_transcripts_of_textworld():
    games = json.loads(GOLDEN.read_text())
    assert [game["data"]["goal"]["kind"] for game in games] == [kind for kind in TASK_TYPES for _ in range(2)]
    assert {game["wording"] for game in games} == {"old", "new"}
    steps = 0
    for game in games:
        world = Engine(household(game["data"]), game["data"]["task"], Official(game["wording"]))
        assert [world.reset(), digest(world.commands), world.won] == game["reset"]
        for command, told, commands, won in game["steps"]:
            assert [world.step(command), digest(world.commands), world.won] == [told, commands, won], command
            steps += 1
    assert steps >= 600
    assert any(step[3] for game in games for step in game["steps"])


def test_pddl_of_our_own_games_reads_back():
    for index in range(12):
        kind, data = draw_room(random.Random(f"pddl {index}"), index, "small")
        problem = household(data)
        again = parse_problem(to_pddl(problem))
        assert again.goal == problem.goal and again.goal.kind == kind
        assert {name: sorted(set(group)) for name, group in problem.facts.items()} == \
            {name: sorted(group) for name, group in again.facts.items()}


def record():
    """Write the golden file: two generated games of each kind, one in each format, walked by TextWorld."""
    games, reference = [], TextWorldEngine()
    for index in range(2 * len(TASK_TYPES)):
        wording = ("old", "new")[index % 2]
        kind, data = draw_room(random.Random(f"golden {index}"), index // 2, "small")
        problem = household(data)
        world = Engine(problem, data["task"], Official(wording))
        opening = [reference.load(to_pddl(problem), data["task"], wording).reset(), digest(reference.commands), reference.won]
        rng, steps = random.Random(index), []
        for number in range(60):
            command = choose(world, "expert" if number >= 30 else "random", rng)
            world.step(command)
            steps.append([command, reference.step(command), digest(reference.commands), reference.won])
        games.append({"wording": wording, "data": data, "reset": opening, "steps": steps})
    GOLDEN.parent.mkdir(exist_ok=True)
    lines = ",\n".join(json.dumps(game, separators=(",", ":")) for game in games)
    GOLDEN.write_text(f"[\n{lines}\n]\n")


# ---- extended: live, on official games ----------------------------------------------------------------------------------
def official_records(folder, count):
    """(PDDL text, goal sentence, walkthrough) of `count` official training games, spread over the files."""
    zstandard = pytest.importorskip("zstandard")
    rows = []
    for name in ("train_other", "train_valid_part1", "train_valid_part2"):
        with open(folder / f"{name}.jsonl.zst", "rb") as file:
            rows += [json.loads(line) for line in io.TextIOWrapper(zstandard.ZstdDecompressor().stream_reader(file), "utf-8")]
    picked = random.Random("parity").sample(rows, count)
    return [(row["pddl_problem"], row["task"], row["walkthrough"]) for row in picked]


def compare_official(folder, games=200, steps=80, fast=True):
    """Both engines on `games` official games, old and new format in turn; prints one summary line and returns its figures."""
    total, theirs, ours, resets, seen, reference = 0, 0.0, 0.0, [], Counter(), TextWorldEngine(fast=fast)
    for number, (pddl, task, walkthrough) in enumerate(official_records(folder, games)):
        wording = ("old", "new")[number % 2]
        start = time.perf_counter()
        world = Engine(parse_problem(pddl), task, Official(wording))
        resets.append(time.perf_counter() - start)
        if wording == "old":
            walkthrough = [re.sub(r"^move (.+) to ", r"put \1 in/on ", command) for command in walkthrough]
        count, spent, own = side_by_side(reference.load(pddl, task, wording), world, walkthrough, number, steps, seen)
        total, theirs, ours = total + count, theirs + spent, ours + own
    figures = {"games": games, "steps": total, "unseen": sorted(RARE - set(+seen)), "textworld_steps_per_s": total / theirs,
               "own_steps_per_s": total / ours, "ratio": theirs / ours, "own_reset_ms_max": 1000 * max(resets)}
    print(json.dumps(figures), dict(seen.most_common()))
    return figures


@pytest.mark.extended
@pytest.mark.skipif(bool(missing()), reason=f"TextWorld: {missing()}")
def test_official_games_side_by_side(eppo_data):
    figures = compare_official(eppo_data("alfworld"), games=200, steps=80)
    assert figures["steps"] >= 20_000 and figures["unseen"] == []
    assert figures["own_steps_per_s"] >= 2000 and figures["own_reset_ms_max"] < 20


@pytest.mark.extended
@pytest.mark.skipif(bool(missing()), reason=f"TextWorld: {missing()}")
def test_caches_do_not_change_textworld(eppo_data):
    """TextWorld as it comes, without our caches, in a process of its own: the same texts, and the ratio its users would see
    (1,000 to 1,700 on an idle core; a busy machine disturbs the few milliseconds of ours)."""
    command = [sys.executable, __file__, str(eppo_data("alfworld")), "4", "40", "stock"]
    out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    print(out)
    figures = json.JSONDecoder().raw_decode(out)[0]
    assert figures["games"] == 4 and figures["steps"] > 200 and figures["ratio"] > 500


@pytest.mark.extended
@pytest.mark.skipif(bool(missing()), reason=f"TextWorld: {missing()}")
def test_textworld_as_the_environments_engine():
    """`backend="textworld"` plays the same episodes; a difference between the engines would be an EnvFault."""
    for rules in ("strict", "agentbench"):
        env = envs.make("alfworld", size="small", split="dev", rules=rules, backend="textworld")
        own = envs.make("alfworld", size="small", split="dev", rules=rules)
        for index in range(6):
            assert env.reset(index) == own.reset(index)
            for turn in ["nothing", assistant_call("take_action", action="Go to it!"), *env.oracle(index)]:
                result = env.step(turn)
                assert result == own.step(turn)
            assert result.reward == 1


@pytest.mark.extended
@pytest.mark.skipif(bool(missing()), reason=f"TextWorld: {missing()}")
def test_new_games_leave_textworlds_memory_flat():
    """TextWorld keeps every proposition of every game; the engine drops them with the game (before: 0.4 MB a game)."""
    env, readings = envs.make("alfworld", size="small", split="dev", backend="textworld"), []
    for index in range(60):
        env.reset(index)
        env.step(env.expert())
        readings.append(memory_mb())
    env.close()
    assert min(readings[50:]) - min(readings[10:20]) < 4


@pytest.mark.extended
def test_stored_walkthroughs_of_all_official_games_win(eppo_data):
    records = official_records(eppo_data("alfworld"), 3553)
    for pddl, task, walkthrough in records:
        problem = parse_problem(pddl)
        again = parse_problem(to_pddl(problem))
        assert again.goal == problem.goal and {k: sorted(v) for k, v in again.facts.items()} == \
            {k: sorted(v) for k, v in problem.facts.items()}
        world = Engine(again, task, Official("new"))
        for command in walkthrough:
            assert command in world.commands, (task, command)
            world.step(command)
        assert world.won, task


@pytest.mark.extended
def test_expert_solves_all_official_games_within_the_turn_limit(eppo_data):
    worst = 0
    for pddl, task, _ in official_records(eppo_data("alfworld"), 3553):
        world = Engine(parse_problem(pddl), task, Official("old"))
        turns = 0
        while not world.won and turns < 20:
            world.step(next_command(world))
            turns += 1
        assert world.won, task
        worst = max(worst, turns)
    print("most turns", worst)


@pytest.mark.extended
def test_official_game_files_load_or_say_why(eppo_data):
    reasons, loaded = [], 0
    for path in sorted(eppo_data("alfworld/games").glob("json_2.1.*/*/*/*/game.tw-pddl")):
        try:
            loaded += load_game(path).wording == "old"
        except ValueError as error:
            reasons.append(str(error))
    assert loaded >= 20 and set(reasons) <= {"marked as not solvable"}


if __name__ == "__main__":
    if sys.argv[1:] == ["record"]:
        record()
    else:
        compare_official(Path(sys.argv[1]), games=int(sys.argv[2]), steps=int(sys.argv[3]), fast=sys.argv[4:] != ["stock"])
