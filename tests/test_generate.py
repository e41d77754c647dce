"""Generators: exact log-probabilities over turns, refilling, pools, syncs, threads, repeatability."""

import random
import threading
from concurrent.futures import Future

import pytest
import torch
from models import tiny_model

from eppo.generate import STALE, Completion, Request, ScriptedGenerator, TransformersGenerator, stable_seed
from eppo.policy import token_scores

V = 200


def play(generator, sessions, turns=3, pools=("fresh",), temperature=1.0, max_active=None, stop=(5,)):
    """Random dialogues through `stream`; returns ids, mask and log-probabilities per session."""
    logs = [([], [], []) for _ in range(sessions)]

    def request(number, turn):
        rng = random.Random(f"{number % 4}/{turn}" if turn == 0 else f"{number}/{turn}")
        new = [rng.randrange(V) for _ in range(rng.randrange(3, 40))]
        ids, mask, logp = logs[number]
        ids += new
        mask += [0] * len(new)
        logp += [0.0] * len(new)
        return Request(f"s{number}", new, rng.randrange(1, 20), temperature, stop, stable_seed(number, turn),
                       pools[(number + turn) % len(pools)])

    done = [0] * sessions

    def follow(number, completion):
        ids, mask, logp = logs[number]
        ids += completion.ids
        mask += [1] * len(completion.ids)
        logp += completion.logp
        done[number] += 1
        future = Future()
        future.set_result(request(number, done[number]) if done[number] < turns else None)
        return future

    generator.stream([request(number, 0) for number in range(sessions)], follow, max_active)
    return logs


def rescored(model, ids, mask, temperature=1.0):
    with torch.no_grad():
        return token_scores(model, torch.tensor([ids]), torch.tensor([mask], dtype=torch.bool), temperature).logp_BT[0].tolist()


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_log_probabilities_equal_the_trainers_over_turns(temperature):
    model = tiny_model(vocab=V)
    logs = play(TransformersGenerator(model), 12, temperature=temperature)
    for ids, mask, logp in logs:
        assert sum(mask) > 0
        assert rescored(model, ids, mask, temperature) == pytest.approx(logp, abs=2e-5)


def test_turns_from_two_pools_carry_each_pools_log_probabilities():
    fresh, stale = tiny_model(0, vocab=V), tiny_model(1, vocab=V)
    generator = TransformersGenerator(fresh, 7)
    generator.sync(stale, 3, STALE)
    ids, mask, logp = play(generator, 1, turns=2, pools=("fresh", "stale"))[0]
    split = next(t for t in range(len(mask)) if mask[t]) + 0
    both = [rescored(model, ids, mask) for model in (fresh, stale)]
    turn_of = [0] * len(ids)
    turn = 0
    for t in range(1, len(ids)):
        turn += mask[t] == 1 and mask[t - 1] == 0
        turn_of[t] = turn
    for t in range(split, len(ids)):
        if mask[t]:
            assert logp[t] == pytest.approx(both[turn_of[t] - 1][t], abs=2e-5)
    assert any(abs(both[0][t] - both[1][t]) > 0.1 for t in range(len(ids)) if mask[t])


def test_equal_inputs_give_equal_bits_whatever_the_environments_take():
    model = tiny_model(vocab=V)
    first, second = (play(TransformersGenerator(model), 10, max_active=4) for _ in range(2))
    assert first == second
    assert all(sum(mask) >= 3 for _, mask, _ in first)


def test_what_was_sampled_before_changes_no_batch(monkeypatch):
    from eppo.generate import engine

    shapes, feed = [], engine.Engine._feed

    def watched(self, kv, base, feeds, starts, **more):
        logits_NV = feed(self, kv, base, feeds, starts, **more)
        shapes.append((self.pool, tuple(map(len, feeds)), tuple(starts), base, kv.data.shape))
        return logits_NV

    monkeypatch.setattr(engine.Engine, "_feed", watched)
    model, seen = tiny_model(vocab=V), []
    generator = TransformersGenerator(model)
    generator.sync(model, 0, STALE)
    for sessions in (9, 20, 9):
        shapes.clear()
        play(generator, sessions, pools=("stale", "fresh"))
        seen.append(list(shapes))
        for number in range(sessions):
            generator.end(f"s{number}")
    assert seen[0] == seen[2] != seen[1]


def test_few_slots_play_the_same_tokens_as_many():
    model = tiny_model(vocab=V)
    many, few = play(TransformersGenerator(model), 9), play(TransformersGenerator(model, max_active=2), 9)
    assert [ids for ids, _, _ in many] == [ids for ids, _, _ in few]


def test_sync_changes_what_is_sampled_and_drops_caches():
    first, second = tiny_model(0, vocab=V), tiny_model(1, vocab=V)
    generator = TransformersGenerator(first, 0)
    one, = generator.generate([Request("a", [1, 2, 3], 4, 1.0, (), 9)])
    before = generator.fingerprint()
    generator.sync(second, 1)
    two, = generator.generate([Request("a", [4], 4, 1.0, (), 10)])
    assert generator.fingerprint() != before and (one.version, two.version) == (0, 1)
    ids = [1, 2, 3, *one.ids, 4, *two.ids]
    mask = [0] * (len(ids) - len(two.ids)) + [1] * len(two.ids)
    assert rescored(second, ids, mask)[-len(two.ids):] == pytest.approx(two.logp, abs=2e-5)


def test_greedy_takes_the_most_likely_token_and_stops():
    model = tiny_model(vocab=V)
    with torch.no_grad():
        best = int(model(torch.tensor([[3, 4, 5]])).logits[0, -1].argmax())
    done, = TransformersGenerator(model).generate([Request("a", [3, 4, 5], 8, 0.0, (best,), 1)])
    assert done.ids == [best] and done.finish_reason == "stop"
    cut, = TransformersGenerator(model).generate([Request("a", [3, 4, 5], 1, 0.0, (), 1)])
    assert cut.ids == [best] and cut.finish_reason == "length"


def test_sampling_follows_the_distribution():
    model = tiny_model(vocab=V)
    with torch.no_grad():
        probability = torch.softmax(model(torch.tensor([[3, 4, 5]])).logits[0, -1] / 1.5, -1)
    generator = TransformersGenerator(model, max_active=500)
    drawn = generator.generate([Request(f"s{n}", [3, 4, 5], 1, 1.5, (), stable_seed(n)) for n in range(4000)])
    counts = torch.bincount(torch.tensor([completion.ids[0] for completion in drawn]), minlength=V) / 4000
    top = probability.topk(5).indices
    assert (counts[top] - probability[top]).abs().max() < 4 * (0.25 / 4000) ** 0.5


def test_threads_share_a_batch_and_get_their_own_answers():
    model = tiny_model(vocab=V)
    generator, answers = TransformersGenerator(model), {}
    alone = TransformersGenerator(model)

    def ask(n):
        answers[n] = [generator.generate([Request(f"t{n}", [n + 1, turn + 7], 6, 1.0, (), stable_seed(n, turn))])[0] for turn in range(3)]

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for n in range(12):
        expected = [alone.generate([Request(f"t{n}", [n + 1, turn + 7], 6, 1.0, (), stable_seed(n, turn))])[0].ids for turn in range(3)]
        assert [completion.ids for completion in answers[n]] == expected


def test_a_failure_reaches_every_waiting_thread():
    model = tiny_model(vocab=V)
    generator = TransformersGenerator(model)
    errors = []

    def ask(ids):
        try:
            generator.generate([Request(f"x{ids}", ids, 50, 1.0, (), 1)])
        except (RuntimeError, IndexError) as error:
            errors.append(error)

    threads = [threading.Thread(target=ask, args=([V + 50],)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(errors) == 3
    assert len(generator.generate([Request("ok", [1], 2, 1.0, (), 1)])[0].ids) == 2


@pytest.mark.parametrize("request_, text", [
    (Request("a", [1], 1, 1.0, (), 1, pool="old"), "unknown pool 'old'"),
    (Request("a", [1], 0, 1.0, (), 1), "max_tokens must be at least 1"),
    (Request("a", [], 1, 1.0, (), 1), "no tokens to continue from"),
])
def test_bad_requests_say_what_is_wrong(request_, text):
    with pytest.raises(ValueError, match=text):
        TransformersGenerator(tiny_model(vocab=V)).generate([request_])


def test_scripted_generator_answers_from_its_script():
    generator = ScriptedGenerator([[7, 8, 5], RuntimeError("down"), Completion([1], [-0.5], "length", 4, "fresh")])
    assert generator.generate([Request("a", [1], 9, 1.0, (5,), 0)])[0] == Completion([7, 8, 5], [-1.0] * 3, "stop", 0, "fresh")
    with pytest.raises(RuntimeError, match="down"):
        generator.generate([Request("a", [2], 9, 1.0, (5,), 0)])
    assert generator.generate([Request("a", [3], 9, 1.0, (5,), 0)])[0].version == 4
    assert generator.generate([Request("b", [3], 2, 1.0, (5,), 0)])[0].ids == [7, 8]
