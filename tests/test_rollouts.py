"""Episodes token by token: masks spelled out, statuses, limits, faults; groups, pools, streaming against threads."""

import math

import pytest
import toy_env
from models import tiny_model, tiny_tokenizer

import envs
from envs.base import EnvFault, assistant_call
from envs.tool_calls import render_turn
from eppo.chat import ChatFormat
from eppo.generate import Completion, ScriptedGenerator, TransformersGenerator
from eppo.imitation import demonstrate, encode
from eppo.rollouts import EnvPool, Job, RolloutLimits, run_episode, run_group, run_jobs, to_groups

CHAT = ChatFormat(tiny_tokenizer())
LIMITS = RolloutLimits(max_tokens=400, max_turn_tokens=64)


def turn(name, **arguments):
    return CHAT.turn_ids(render_turn(assistant_call(name, **arguments)))


@pytest.fixture
def env():
    with envs.make("toy_lookup", split="train") as env:
        yield env


def solving_script(env, index):
    return [CHAT.turn_ids(render_turn(message)) for message in env.oracle(index)]


def test_layout_of_a_two_turn_episode(env):
    script = solving_script(env, 0)
    episode = run_episode(env, 0, ScriptedGenerator(script, version=7), CHAT, limits=LIMITS)
    opening = CHAT.opening_ids(env.reset(0), env.tools)
    glue = CHAT.continuation_ids([{"role": "tool", "content": env.instances[0].data["number"]}], ended=True)
    assert episode.ids_T == opening + script[0] + glue + script[1]
    sampled = [0] * len(opening) + [1] * len(script[0]) + [0] * len(glue) + [1] * len(script[1])
    assert episode.mask_T == sampled and episode.num_sampled_tokens == len(script[0]) + len(script[1])
    assert episode.sampler_logp_T == [-1.0 * bit for bit in sampled]
    assert episode.version_T == [7 if bit else -1 for bit in sampled]
    first, second = episode.turns
    assert (first.start, first.stop) == (len(opening), len(opening) + len(script[0]))
    assert (second.start, second.stop) == (len(opening) + len(script[0]) + len(glue), len(episode.ids_T))
    assert (first.calls, first.anchor) == (("look",), env.instances[0].data["word"])
    assert (episode.reward, episode.env_reward, episode.success, episode.status) == (1.0, 1.0, True, "completed")


def test_a_demonstration_has_the_layout_of_a_rollout(env):
    import random

    demo = demonstrate(env, 3, 0.5, random.Random(1))
    ids, mask = encode(demo, CHAT, env.tools)
    episode = run_episode(env, 3, ScriptedGenerator([CHAT.turn_ids(text) for text, _ in demo.turns]), CHAT, limits=LIMITS)
    assert (ids, mask) == (episode.ids_T, episode.mask_T) and demo.success == episode.success


def test_sampled_ids_are_never_tokenised_again(env):
    text = render_turn(assistant_call("look", word=env.instances[0].data["word"]))
    odd = [i for char in text for i in CHAT.tokenizer.encode(char)] + [CHAT.end_id]
    assert odd != CHAT.turn_ids(text) and CHAT.decode(odd) == text
    episode = run_episode(env, 0, ScriptedGenerator([odd, *solving_script(env, 0)[1:]]), CHAT, limits=RolloutLimits(800, 300))
    start = episode.turns[0].start
    assert episode.ids_T[start:start + len(odd)] == odd and episode.success


@pytest.mark.parametrize("limits, script, status, turns", [
    (LIMITS, [turn("look", word="x")] * 9, "task limit reached", 4),
    (RolloutLimits(400, 64, max_turns=2), [turn("look", word="x")] * 9, "task limit reached", 2),
    (RolloutLimits(18, 18), [turn("look", word="x")] * 9, "agent context limit", 1),
    (RolloutLimits(10, 10), [], "agent context limit", 0),
    (LIMITS, [turn("answer", value="no")], "completed", 1),
])
def test_endings_without_success(env, limits, script, status, turns):
    episode = run_episode(env, 0, ScriptedGenerator(script), CHAT, limits=limits)
    assert (episode.status, len(episode.turns), episode.success) == (status, turns, False)
    assert episode.reward == (0.0 if status == "completed" else -0.2) and episode.env_reward == 0.0
    assert len(episode.ids_T) == len(episode.mask_T) == len(episode.sampler_logp_T) == len(episode.version_T) <= limits.max_tokens


def test_evaluation_may_keep_the_environments_reward(env):
    episode = run_episode(env, 0, ScriptedGenerator([turn("look", word="x")] * 9), CHAT,
                          limits=RolloutLimits(400, 64, abnormal_reward=None))
    assert (episode.status, episode.reward) == ("task limit reached", 0.0)


def test_a_turn_cut_by_its_limit_gets_the_end_it_lacks_and_goes_on(env):
    cut = turn("look", word="apple")[:2]
    script = [Completion(cut, [-1.0] * 2, "length", 0, "fresh"), *solving_script(env, 0)]
    episode = run_episode(env, 0, ScriptedGenerator(script), CHAT, limits=LIMITS)
    assert episode.success and episode.turns[0].finish_reason == "length" and episode.info["invalid_calls"] == 1
    assert episode.ids_T[episode.turns[0].stop] == CHAT.end_id and episode.mask_T[episode.turns[0].stop] == 0


@pytest.mark.parametrize("where", ["_start", "_call"])
@pytest.mark.parametrize("fault", [EnvFault("no sandbox"), OSError("pipe")])
def test_faults_of_the_environment_are_no_rewards(env, where, fault, monkeypatch):
    def broken(*args):
        raise fault

    monkeypatch.setattr(env, where, broken)
    episode = run_episode(env, 0, ScriptedGenerator(solving_script(env, 0)), CHAT, limits=LIMITS)
    assert episode.status == "environment error" and math.isnan(episode.reward) and str(fault) in episode.info["error"]


def test_a_failed_generation_is_one_failed_episode(env):
    episode = run_episode(env, 0, ScriptedGenerator([RuntimeError("down")]), CHAT, limits=LIMITS)
    assert episode.status == "model error" and math.isnan(episode.reward) and "down" in episode.info["error"]


def test_a_group_shares_its_prompt_and_id(env):
    group = run_group(env, 2, ScriptedGenerator(solving_script(env, 2)), CHAT, 3, limits=LIMITS)
    assert len(group.trajectories) == 3 and {t.group_id for t in group.trajectories} == {group.group_id}
    assert len({t.seed for t in group.trajectories}) == 3 and all(t.success for t in group.trajectories)


def jobs(count=12):
    return [Job(task, n % 5, f"{task}/{n // 3}", 100 + n) for n in range(count) for task in toy_env.TOY_TASKS]


def pool(split="train"):
    return EnvPool(lambda task: envs.make(task, split=split))


def key(trajectory):
    return (trajectory.ids_T, trajectory.mask_T, trajectory.status, trajectory.group_id, trajectory.instance_id, trajectory.seed)


def test_streaming_is_repeatable_to_the_bit_and_plays_every_job_in_order():
    model, environments, runs = tiny_model(), pool(), []
    for concurrency, workers in ((5, 4), (5, 1), (64, 4)):
        runs.append(run_jobs(jobs(), environments, TransformersGenerator(model), CHAT, LIMITS, workers=workers, concurrency=concurrency))
    assert [(t.task, t.group_id) for t in runs[0]] == [(job.task, job.group_id) for job in jobs()]
    assert [(key(t), t.sampler_logp_T) for t in runs[0]] == [(key(t), t.sampler_logp_T) for t in runs[1]]
    assert [key(t) for t in runs[0]] == [key(t) for t in runs[2]]
    environments.close()


def test_threads_and_streaming_play_the_same_episodes():
    class Plain:
        """The same generator without `stream`."""

        def __init__(self, generator):
            self.generate, self.end = generator.generate, generator.end

    model, environments = tiny_model(), pool()
    streamed = run_jobs(jobs(), environments, TransformersGenerator(model), CHAT, LIMITS)
    threaded = run_jobs(jobs(), environments, Plain(TransformersGenerator(model)), CHAT, LIMITS, concurrency=8)
    assert [key(t) for t in streamed] == [key(t) for t in threaded]
    environments.close()


def test_turns_go_to_the_stale_pool_in_its_share():
    model, environments = tiny_model(), pool()
    generator = TransformersGenerator(model, 9)
    generator.sync(tiny_model(1), 4, "stale")
    played = run_jobs(jobs(60), environments, generator, CHAT, RolloutLimits(400, 24, stale_share=0.25))
    versions = [t.version_T[turn.start] for t in played for turn in t.turns]
    assert set(versions) == {4, 9} and versions.count(4) / len(versions) == pytest.approx(0.25, abs=0.1)
    environments.close()


def test_to_groups_keeps_order():
    made = [run_episode(envs.make("toy_lookup"), 0, ScriptedGenerator([turn("answer", value="0")]), CHAT, seed=s, limits=LIMITS)
            for s in range(4)]
    for trajectory, group in zip(made, "abab"):
        trajectory.group_id = group
    groups = to_groups(made)
    assert [g.group_id for g in groups] == ["a", "b"] and [t.seed for t in groups[1].trajectories] == [1, 3]
