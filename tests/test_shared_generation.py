"""What turns have in common is computed once: equal texts, shared prompts, guessed tokens. None of it changes what is sampled."""

import gc
import random
import threading
import time
import weakref
from concurrent.futures import Future

import pytest
import torch
from models import tiny_model
from test_generate import V, rescored
from transformers import GPT2Config, GPT2LMHeadModel

from eppo.generate import STALE, Request, TransformersGenerator, drafts, engine, stable_seed, trunks
from eppo.generate.drafts import Drafts
from eppo.generate.kv_cache import KVBatch

RNG = random.Random(0)
PROMPTS = [[RNG.randrange(V) for _ in range(length)] for length in (40, 37, 21, 9)]


def dialogues(generator, *, groups=(5, 3, 1, 2), turns=3, pools=("fresh",), temperature=1.0, stop=(5, 6, 7)):
    """Groups of sessions with one prompt each; ids, mask and log-probabilities per session."""
    prompts = [prompt for prompt, members in zip(PROMPTS, groups) for _ in range(members)]
    logs = [([], [], []) for _ in prompts]

    def request(number, turn):
        new = prompts[number] if turn == 0 else [50 + turn, 60, 61 + len(logs[number][0]) % 3]
        for log, values in zip(logs[number], (new, [0] * len(new), [0.0] * len(new))):
            log += values
        return Request(f"s{number}", new, 14, temperature, stop, stable_seed(number, turn), pools[(number + turn) % len(pools)])

    def follow(number, completion):
        for log, values in zip(logs[number], (completion.ids, [1] * len(completion.ids), completion.logp)):
            log += values
        turn, future = sum(a < b for a, b in zip(logs[number][1], logs[number][1][1:])), Future()
        future.set_result(request(number, turn) if turn < turns else None)
        return future

    generator.stream([request(number, 0) for number in range(len(prompts))], follow)
    return logs


@pytest.fixture
def passes(monkeypatch):
    """(rows, widest row) of every forward pass."""
    seen, feed = [], engine.Engine._feed

    def watched(self, kv, base, feeds, *args, **more):
        seen.append((len(feeds), max(map(len, feeds))))
        return feed(self, kv, base, feeds, *args, **more)

    monkeypatch.setattr(engine.Engine, "_feed", watched)
    return seen


def alone(model, **settings):
    """The same dialogues, every one in a generator of its own that guesses nothing and shares nothing."""
    logs = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drafts, "LONGEST", 0)
        for number in range(11):
            generator = TransformersGenerator(model, shared_prompts=0)
            if settings.get("stale"):
                generator.sync(settings["stale"], 0, STALE)
            whole = dialogues_of(generator, number, **{key: value for key, value in settings.items() if key != "stale"})
            logs.append(whole)
    return logs


def dialogues_of(generator, number, groups=(5, 3, 1, 2), turns=3, pools=("fresh",), temperature=1.0, stop=(5, 6, 7)):
    prompts = [prompt for prompt, members in zip(PROMPTS, groups) for _ in range(members)]
    ids, mask, logp = [], [], []
    for turn in range(turns):
        new = prompts[number] if turn == 0 else [50 + turn, 60, 61 + len(ids) % 3]
        done, = generator.generate([Request(f"s{number}", new, 14, temperature, stop, stable_seed(number, turn),
                                            pools[(number + turn) % len(pools)])])
        ids += [*new, *done.ids]
        mask += [0] * len(new) + [1] * len(done.ids)
        logp += [0.0] * len(new) + done.logp
    return ids, mask, logp


@pytest.mark.parametrize("kernel", ["torch's", "plain"])
@pytest.mark.parametrize("trunk_from", [1, 30, 1000])
@pytest.mark.parametrize("spare", [0, 1 << 30])
def test_shared_turns_are_those_of_sessions_alone(monkeypatch, kernel, trunk_from, spare):
    monkeypatch.setattr(engine, "TRUNK_FROM", trunk_from)
    monkeypatch.setattr(trunks, "SPARE_SCORES", spare)
    if kernel == "plain":
        monkeypatch.setattr(trunks, "attention", trunks.plain_attention)
        monkeypatch.setattr(trunks, "MOST_SCORES", 1 << 8)
    built, init = [], trunks.Trunks.__init__
    monkeypatch.setattr(trunks.Trunks, "__init__", lambda self, *args: init(self, *args) or built.append(self))
    model, other = tiny_model(vocab=V), tiny_model(1, vocab=V)
    generator = TransformersGenerator(model)
    generator.sync(other, 0, STALE)
    found = dialogues(generator, pools=("fresh", "fresh", "stale"))
    expected = alone(model, pools=("fresh", "fresh", "stale"), stale=other)
    assert [ids for ids, _, _ in found] == [ids for ids, _, _ in expected]
    for (_, mask, logp), (_, other_mask, other_logp) in zip(found, expected):
        assert mask == other_mask and logp == pytest.approx(other_logp, abs=2e-5)
    assert bool(built) == (trunk_from < 1000)
    if trunk_from == 30:                                    # two prompts are long and shared; rows without a trunk run beside them
        assert any(not one.all for one in built) and max(len(one.distinct) for one in built) == 2


def test_log_probabilities_are_the_trainers_with_everything_shared(monkeypatch):
    monkeypatch.setattr(engine, "TRUNK_FROM", 1)
    model = tiny_model(vocab=V)
    for ids, mask, logp in dialogues(TransformersGenerator(model), temperature=0.7):
        assert rescored(model, ids, mask, 0.7) == pytest.approx(logp, abs=2e-5)


def test_a_prompt_that_begins_like_another_is_pre_filled_from_where_it_differs(passes):
    system = [random.Random(1).randrange(V) for _ in range(60)]
    prompts = [system + [100 + n, 7] for n in range(3)] + [[9, 8, 7]]
    requests = [Request(f"s{n}", prompts[n % 4], 1, 1.0, (), n) for n in range(16)]
    model = tiny_model(vocab=V)
    found = TransformersGenerator(model).generate(requests)
    assert passes == [(2, 61), (2, 1), (4, 1)]              # two kinds of prompt; what differs in their like; the last token of each
    apart = TransformersGenerator(model, shared_prompts=0).generate(requests)
    assert [completion.ids for completion in found] == [completion.ids for completion in apart]
    assert [completion.logp[0] for completion in found] == pytest.approx([completion.logp[0] for completion in apart], abs=2e-5)


def test_equal_texts_are_one_row_until_they_are_sampled_apart(passes):
    model = tiny_model(vocab=V)
    requests = [Request(f"s{n}", [1, 2, 3], 6, 1.0, (), n % 2, "fresh") for n in range(8)]
    found = TransformersGenerator(model).generate(requests)
    assert found[0].ids != found[1].ids and all(done.ids == found[n % 2].ids for n, done in enumerate(found))
    assert passes[:2] == [(1, 2), (1, 1)] and {rows for rows, _ in passes[2:]} <= {1, 2} and (2, 1) in passes
    warm = [Request(f"w{n}", [1, 2, 3], 6, 1.0 - n / 10, (), 0, "fresh") for n in range(3)]
    passes.clear()
    TransformersGenerator(model).generate(warm)
    assert passes[1] == (3, 1)                              # at other temperatures the same text is another row


def test_greedy_sessions_stay_one_row(passes):
    generator = TransformersGenerator(tiny_model(vocab=V))
    found = generator.generate([Request(f"s{n}", [9, 8, 7], 5, 0.0, (), n, "fresh") for n in range(6)])
    assert len({tuple(done.ids) for done in found}) == 1 and {rows for rows, _ in passes} == {1}
    passes.clear()
    generator.generate([Request(f"s{n}", [4, 4 + n // 3], 5, 0.0, (), n, "fresh") for n in range(6)])
    assert passes[0] == (2, 3)                              # their caches are one, too: the last sampled token and two new ones


def test_right_guesses_save_passes_and_change_no_token(passes, monkeypatch):
    model = tiny_model(vocab=12)                            # of few tokens: what it writes repeats
    prompts = [[token % 12 for token in prompt] for prompt in PROMPTS]
    requests = [Request(f"s{n}", prompts[n % 4], 60, 0.0, (), n, "fresh") for n in range(6)]
    found = TransformersGenerator(model).generate(requests)
    with_guesses = len(passes)
    monkeypatch.setattr(drafts, "LONGEST", 0)
    plain = TransformersGenerator(model).generate(requests)
    assert [done.ids for done in found] == [done.ids for done in plain]
    for done, other in zip(found, plain):
        assert done.logp == pytest.approx(other.logp, abs=5e-5)
    assert with_guesses < 0.7 * (len(passes) - with_guesses) and max(width for _, width in passes[4:with_guesses]) > 2


@pytest.mark.parametrize("right", [0.0, 0.5, 1.0])
def test_guesses_right_and_wrong_leave_the_same_tokens_and_caches(monkeypatch, right):
    """Guesses from an oracle of the plain tokens, spoilt at random: every length of agreement occurs."""
    model = tiny_model(vocab=V)
    plain = dialogues(TransformersGenerator(model), stop=(5,))
    rng, texts = random.Random(0), [ids for ids, _, _ in plain]

    def guess(self, asked, pass_tokens):
        guesses = []
        for text, _, most in asked:
            whole = next(ids for ids in texts if ids[:len(text)] == text)
            guesses.append([token if rng.random() < right else (token + 1) % V for token in whole[len(text):len(text) + min(most, 4)]])
        return guesses

    monkeypatch.setattr(Drafts, "guess", guess)
    found = dialogues(TransformersGenerator(model), stop=(5,))
    assert [ids for ids, _, _ in found] == texts
    for (_, _, logp), (_, _, other) in zip(found, plain):
        assert logp == pytest.approx(other, abs=2e-5)


def test_a_model_with_a_table_of_positions_is_served_to_its_last_one():
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=V, n_positions=32, n_embd=16, n_layer=2, n_head=2, bos_token_id=None, eos_token_id=None))
    model.eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(8)
    prompts = [[1, 2] * 8, [1, 2] * 6, [3, 4, 5], list(range(30))]
    found = TransformersGenerator(model).generate([Request(f"s{n}", prompt, 32 - len(prompt), 1.0, (), n)
                                                   for n, prompt in enumerate(prompts)])
    for prompt, done in zip(prompts, found):
        assert len(prompt) + len(done.ids) == 32
        ids, mask = prompt + done.ids, [0] * len(prompt) + [1] * len(done.ids)
        assert rescored(model, ids, mask)[len(prompt):] == pytest.approx(done.logp, abs=5e-5)


@pytest.mark.parametrize("dtype, error", [(torch.float32, 2e-6), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("kernel", [trunks.attention, trunks.plain_attention])
@pytest.mark.parametrize("spare", [0, 1 << 30])
def test_attention_over_trunk_and_own_keys_is_that_over_both(monkeypatch, dtype, error, kernel, spare):
    monkeypatch.setattr(trunks, "attention", kernel)
    monkeypatch.setattr(trunks, "SPARE_SCORES", spare)
    torch.manual_seed(0)
    shared = [torch.randn(2, 2, 2, length, 8).to(dtype) for length in (30, 17)]
    of_rows = [shared[0], None, shared[1], shared[0], shared[0]]
    query, key, value = (2 * torch.randn(5, heads, length, 8) for heads, length in ((4, 3), (2, 6), (2, 6)))
    mask = torch.zeros(5, 1, 3, 6).masked_fill_(torch.rand(5, 1, 3, 6) < 0.3, float("-inf"))
    mask[..., 0] = 0
    found = trunks.Trunks(of_rows).attend(*(x.to(dtype) for x in (query, key, value, mask)), 0.4, 1)
    assert found.dtype == dtype
    for row, trunk in enumerate(of_rows):
        before = torch.zeros(2, 2, 0, 8) if trunk is None else trunk[1].float()
        keys, values = (torch.cat([one, other[row]], dim=1)[None] for one, other in zip(before, (key.to(dtype), value.to(dtype))))
        bias = torch.cat([torch.zeros(1, 1, 3, before.shape[2]), mask[row, None]], dim=-1)
        whole = torch.nn.functional.scaled_dot_product_attention(query[row, None].to(dtype).float(), keys.float(), values.float(), bias,
                                                                 scale=0.4, enable_gqa=True)
        torch.testing.assert_close(found[row].float(), whole[0], rtol=error, atol=error)


def test_a_stack_of_trunks_serves_until_half_of_it_is_done():
    shared = [torch.randn(2, 2, 1, length, 4) for length in (5, 6, 7, 8)]
    first = trunks.Trunks([*shared, shared[0]])
    second = trunks.Trunks([shared[3], shared[1]], first)
    assert second.data is first.data and second.members == [[], [1], [], [0]]
    third = trunks.Trunks([shared[3]], second)
    assert third.data is not first.data and third.data.shape[2] == 1
    assert trunks.Trunks([shared[3], torch.randn(2, 2, 1, 5, 4)], first).data is not first.data


# ---- drafts ---------------------------------------------------------------------------------------------------------
def test_guesses_follow_what_was_seen_longest_context_first():
    book = Drafts()
    book.note([1, 2, 3, 4, 5, 6, 7], 0)
    assert book.guess([([9, 9, 2, 3, 4], 1, 9)], 1000) == [[5, 6, 7]]
    assert book.guess([([9, 9, 2, 3, 4], 1, 2)], 1000) == [[5, 6]]
    assert book.guess([([8, 8, 8], 1, 9), ([5, 6], 1, 9)], 1000) == [[], [7]]
    book.note([0, 3, 4, 8], 0)                              # two tokens say 8 now, three still say 5
    assert book.guess([([2, 3, 4], 1, 1), ([7, 3, 4], 1, 1)], 1000) == [[5], [8]]


def test_a_text_that_grows_is_noted_from_where_it_grew():
    one, other = Drafts(), Drafts()
    rng = random.Random(3)
    text = [rng.randrange(4) for _ in range(60)]
    other.note(text, 0)
    for cut in range(0, 60, 7):
        one.note(text[:cut + 7], cut)
    assert one._next == other._next and len(one._next) > 20


def test_guesses_are_as_long_as_pays():
    book = Drafts()
    for _ in range(30):
        book.note([1, 2, 3, 4, 5, 6, 7, 8, 9], 0)
    once = ([1, 2, 3, 4, 5], 1, 9)
    assert len(book.guess([once], 64)[0]) == 4              # one row: a pass costs the same with or without
    assert [len(guess) for guess in book.guess([once] + [([50, 50], 1, 9)] * 300, 64)] == [0] * 301   # pads for all to save one a token
    assert {len(guess) for guess in book.guess([once] * 300, 64)} == {1}           # a full batch: what the chance pays for


def test_drafts_begin_anew_when_they_are_full(monkeypatch):
    monkeypatch.setattr(drafts, "MOST_PLACES", 50)
    book = Drafts()
    for n in range(40):
        book.note(list(range(n * 10, n * 10 + 10)), 0)
        assert len(book._next) <= 50 + 30
    assert book.guess([([392, 393], 1, 1)], 64) == [[394]]


# ---- faults ---------------------------------------------------------------------------------------------------------
def test_a_prompt_that_is_the_beginning_of_a_known_one():
    model = tiny_model(vocab=V)
    generator, plain = TransformersGenerator(model), TransformersGenerator(model, shared_prompts=0)
    for number, prompt in enumerate(([1, 2, 3, 4, 5], [1, 2, 3], [1, 2], [1], [1, 2, 3, 4], [1, 2, 3])):
        request = Request(f"s{number}", prompt, 3, 1.0, (), number)
        assert generator.generate([request])[0].ids == plain.generate([request])[0].ids


@pytest.mark.parametrize("part", ["_learn", "_admit", "tick"])
def test_a_failure_anywhere_reaches_every_caller_and_leaves_a_generator_that_works(monkeypatch, part):
    generator, model = TransformersGenerator(tiny_model(vocab=V)), tiny_model(vocab=V)
    generator.sync(model, 0, STALE)
    real, ends, queued = getattr(engine.Engine, part), {}, threading.Event()

    def failing(self, *args):
        assert queued.wait(30)
        if self.pool == "stale":                            # the other pool's rows may be finished already
            raise MemoryError("no room")
        return real(self, *args)

    def ask(number):
        try:
            ends[number] = generator.generate([Request(f"s{number}", [1, 2, number], 3, 1.0, (), number, ("fresh", "stale")[number % 2])])
        except (RuntimeError, MemoryError) as error:
            ends[number] = error

    with monkeypatch.context() as patch:
        patch.setattr(engine.Engine, part, failing)
        generator._driving = True                           # all requests are waiting when the first is admitted
        threads = [threading.Thread(target=ask, args=(number,), daemon=True) for number in range(4)]
        for thread in threads:
            thread.start()
        while len(generator._waiting) < 4:
            time.sleep(0.01)
        queued.set()
        with generator._changed:
            generator._driving = False
            generator._changed.notify_all()
        for thread in threads:
            thread.join(30)
    assert sorted(ends) == [0, 1, 2, 3] and all(isinstance(ends[number], (RuntimeError, MemoryError)) for number in (1, 3))
    assert not generator._results and not generator._asked and not generator._waiting
    again = Request("new", [3, 4], 3, 1.0, (), 1)
    assert generator.generate([again]) == TransformersGenerator(model).generate([again])


def test_one_bad_request_of_several_leaves_the_sessions_alone():
    generator = TransformersGenerator(tiny_model(vocab=V))
    with pytest.raises(ValueError, match="max_tokens"):
        generator.generate([Request("x", [1, 2], 2, 1.0, (), 0), Request("y", [1], 0, 1.0, (), 0)])
    assert not generator._sessions


def test_weights_that_are_not_finite_spoil_nothing_that_comes_after():
    bad, good = tiny_model(vocab=V), tiny_model(1, vocab=V)
    with torch.no_grad():
        next(bad.parameters()).fill_(float("nan"))
    generator = TransformersGenerator(bad)
    generator.generate([Request(f"a{n}", [n, *range(40)], 4, 1.0, (), n) for n in range(8)])
    for n in range(8):
        generator.end(f"a{n}")
    generator.sync(good, 1)
    asked = [Request("b", list(range(10)), 4, 1.0, (), 0), Request("c", list(range(5, 40)), 4, 1.0, (), 1)]
    assert generator.generate(asked) == TransformersGenerator(good, 1).generate(asked)


def test_a_turn_that_failed_leaves_its_session_as_it_was(monkeypatch):
    model = tiny_model(vocab=V)
    generator, again = TransformersGenerator(model), Request("s", [4], 6, 1.0, (), 3)
    real, ticks = engine.Engine.tick, []

    def failing(self):
        ticks.append(1)
        if len(ticks) == 3:
            raise MemoryError("once")
        return real(self)

    monkeypatch.setattr(engine.Engine, "tick", failing)
    with pytest.raises(MemoryError):
        generator.generate([Request("s", [1, 2, 3], 8, 1.0, (), 0)])
    whole, = TransformersGenerator(model).generate([Request("s", [1, 2, 3, 4], 6, 1.0, (), 3)])
    assert generator.generate([again])[0].ids == whole.ids


def test_episodes_that_fit_the_attention_window_are_served_beside_each_other():
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(vocab_size=V, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
                                         intermediate_size=32, use_sliding_window=True, sliding_window=300, max_window_layers=1,
                                         max_position_embeddings=512, bos_token_id=None, eos_token_id=None)).eval()
    prompts = [[n % V for n in range(200)]] * 2 + [[7 * n % V for n in range(150)]]
    asked = [Request(f"s{n}", prompt, 4, 1.0, (), n) for n, prompt in enumerate(prompts)]
    found = TransformersGenerator(model).generate(asked)
    assert [done.ids for done in found] == [done.ids for done in TransformersGenerator(model, shared_prompts=0).generate(asked)]
    with pytest.raises(ValueError, match="window .300."):
        TransformersGenerator(model).generate([Request("s", [n % V for n in range(298)], 9, 1.0, (), 0)])


# ---- storage --------------------------------------------------------------------------------------------------------
def test_memory_that_is_used_again_is_read_behind_the_mask_only():
    model = tiny_model(vocab=V)
    generator, fresh = TransformersGenerator(model), TransformersGenerator(model)
    dialogues(generator)
    for number in range(11):
        generator.end(f"s{number}")
    kept = generator._engines["fresh"].kv
    assert kept.data.numel() and dialogues(generator) == dialogues(fresh)


def test_a_row_takes_nothing_where_nothing_is_stored():
    kv = KVBatch(tiny_model(vocab=V))
    kv.reserve(2, 4)
    before = kv.data.clone()
    kv.load(1, None)
    assert torch.equal(kv.data, before)


def test_a_generator_that_is_gone_leaves_no_working_batch_behind():
    generator = TransformersGenerator(tiny_model(vocab=V))
    generator.generate([Request("s", [1, 2, 3], 4, 1.0, (), 0)])
    batches = [weakref.ref(batch) for one in generator._engines.values() for batch in (one.kv, one.prompts_kv)]
    del generator
    gc.collect()
    assert [batch() for batch in batches] == [None] * 2
