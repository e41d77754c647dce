"""The household's engine, expert, names and BLEU mapping, and how fast they are."""

import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

import envs
from envs.alfworld_env.bleu import nearest_command, sentence_bleu
from envs.alfworld_env.expert import next_command
from envs.alfworld_env.game import names_of
from envs.alfworld_env.generate import draw_room, household


@pytest.fixture(scope="module")
def small():
    return envs.make("alfworld", size="small")


def test_expert_recovers_from_anything(small):
    rng, turns = random.Random(5), []
    for index in range(60):
        world = small._world(small.instances[index])
        for _ in range(25):
            world.step(rng.choice(world.commands))
        spent = 0
        while not world.won:
            assert spent < 15, small.instances[index].id
            world.step(next_command(world))
            spent += 1
        turns.append(spent)
    assert sum(turns) / len(turns) < 8


def test_names_count_down_over_sorted_ids():
    """ALFWorld numbers a type's instances from the last id to the first, and calls a sink's basin a sinkbasin."""
    problem = household(draw_room(random.Random(0), 3, "full")[1])
    names = names_of(problem)
    cabinets = [names[r] for r in sorted(names) if r.startswith("cabinet_bar_")]
    assert cabinets == [f"cabinet {number}" for number in range(len(cabinets), 0, -1)]
    assert "sinkbasin 1" in names.values() and "sink 1" not in names.values()


def test_speed_on_one_core(small):
    worlds = [small._world(instance) for instance in small.instances[:20]]
    rng, steps, start = random.Random(0), 0, time.perf_counter()
    for world in worlds:
        for _ in range(200):
            world.step(rng.choice(world.commands))
            steps += 1
    assert steps / (time.perf_counter() - start) > 2000
    start = time.perf_counter()
    for index in range(40):
        small.reset(index)
    assert (time.perf_counter() - start) / 40 < 0.02


def test_generation_and_play_do_not_depend_on_the_hash_seed():
    code = ("import random, envs, hashlib\nenv = envs.make('alfworld', size='small', split='dev')\nlog = []\n"
            "for i in range(8):\n    log += [m['content'] for m in env.reset(i)]\n    rng = random.Random(i)\n"
            "    for _ in range(10):\n        turn = env.expert() if rng.random() < .5 else env.mistake(rng)\n"
            "        log.append(str(turn)); log += [m['content'] for m in env.step(turn).messages]\n"
            "print(hashlib.sha256('\\n'.join(log).encode()).hexdigest())")
    root = Path(__file__).resolve().parent.parent
    digests = {subprocess.run([sys.executable, "-c", code], cwd=root, env={"PYTHONHASHSEED": seed, "PATH": ""}, check=True,
                              capture_output=True, text=True).stdout for seed in ("0", "1", "77")}
    assert len(digests) == 1


def test_bleu_is_nltks_with_smoothing_method_4():
    # values of nltk 3.10.4: sentence_bleu([reference], hypothesis, smoothing_function=SmoothingFunction().method4)
    for reference, hypothesis, value in (
            ("go to desk 1", "go to desk 1", 1.0), ("go to desk 1", "go to desk 2", 0.43146827293898643), ("look", "look", 1.0),
            ("take cup 1 from desk 1", "take the cup from desk", 0.11801586795186178), ("inventory", "look", 0.0),
            ("go to bed 1", "bed", 0.049787068367863944),
            ("use lamp 1", "i will now use the lamp 1 please", 0.07882588442342651)):
        assert sentence_bleu(reference.split(), hypothesis.split()) == pytest.approx(value, abs=1e-15)
    assert nearest_command("go desk 2", ["go to bed 1", "go to desk 1", "go to desk 2"]) == "go to desk 2"
    assert nearest_command("xyz", ["look", "help"]) == "xyz"
    assert nearest_command("look", []) == "look"
