"""Endpoints: a server that misbehaves in every way we know of, retries, limits, cost, and whole episodes over messages."""

import json
import threading
import time

import pytest
import toy_env  # noqa: F401  registers the tasks
from chat_server import ChatServer, message

import eppo.generate.openai_generator as module
from envs import EnvFault
from eppo.generate import OpenAIGenerator, stable_seed
from eppo.generate.openai_generator import ContextFull, EndpointError, EndpointRefused, EndpointSlow
from eval.agentbench import evaluate
from eval.episodes import NOT_RUN, answered, spoken

TASK = "toy_lookup"
ASKED = [{"role": "system", "content": "look then answer"}, {"role": "user", "content": "apple"}]
TOOLS = toy_env.LookupEnv.tools


@pytest.fixture(scope="module")
def running():
    with ChatServer() as server:
        yield server


@pytest.fixture
def server(running, monkeypatch):
    running.plan, running.always = [], None
    for records in (running.requests, running.headers, running.times):
        records.clear()
    monkeypatch.setattr(module, "FIRST_PAUSE_S", 0.02)
    monkeypatch.setenv("TEST_KEY", "sk-secret")
    return running


def generator(server, **settings):
    return OpenAIGenerator("some-model", server.url, **({"key_env": "TEST_KEY", "timeout_s": 5.0} | settings))


def ask(made, **settings):
    return made.chat(ASKED, TOOLS, **({"temperature": 0.8, "max_tokens": 64, "seed": 2**62 + 5} | settings))


def play(server, seeds=(0,), instances=1, out=None, concurrency=2, made=None, **settings):
    made = made or generator(server)
    return evaluate(made, [TASK], seeds, size="micro", instances=instances, out=out, concurrency=concurrency, **settings)


# ---- one call -------------------------------------------------------------------------------------------------------
def test_what_a_request_says(server):
    reply = ask(generator(server, body={"reasoning_effort": "low", "temperature": None}))
    body, = server.requests
    assert body == {"model": "some-model", "messages": ASKED, "tools": TOOLS, "tool_choice": "auto", "max_completion_tokens": 64,
                    "seed": 5, "reasoning_effort": "low"}
    assert server.headers[0]["authorization"] == "Bearer sk-secret"
    assert (reply.attempts, reply.prompt_tokens, reply.sampled_tokens, reply.served) == (1, 100, 7, "served-model")
    ask(generator(server, token_limit="max_tokens"))
    assert server.requests[1]["max_tokens"] == 64 and server.requests[1]["temperature"] == 0.8


def test_the_key_comes_from_the_environment_and_leaves_no_trace(server, monkeypatch):
    server.always = "broken"
    made = generator(server, attempts=2)
    with pytest.raises(EndpointError) as caught:
        ask(made)
    assert "[key]" in str(caught.value) and "sk-secret" not in str(caught.value) + repr(made.describe())
    monkeypatch.delenv("TEST_KEY")
    with pytest.raises(ValueError, match="environment variable TEST_KEY is not set; it must hold the key for api.example.com"):
        OpenAIGenerator("m", "https://api.example.com/v1", key_env="TEST_KEY")
    server.always = None
    ask(generator(server))                                  # on this machine no key is needed
    assert "authorization" not in server.headers[-1]


@pytest.mark.parametrize("fault, words", [("limited", "HTTP 429"), ("broken", "HTTP 500"), ("truncated", "without a message"),
                                          ("cut", "RemoteProtocolError"), ("empty", "IndexError"), ("slow", "ReadTimeout")])
def test_what_may_pass_is_tried_again(server, fault, words):
    server.plan, timeout_s = [fault], 1.0 if fault == "slow" else 5.0
    made = generator(server, timeout_s=timeout_s)
    assert ask(made).attempts == 2 and len(server.requests) == 2 and server.requests[0] == server.requests[1]
    server.plan = [fault] * 2
    with pytest.raises(EndpointError, match=f"no usable answer in 2 attempts; the last: .*{words}"):
        ask(generator(server, timeout_s=timeout_s, attempts=2))
    assert len(server.requests) == 4


def test_retry_after_is_honoured(server):
    server.plan = ["limited", "limited"]
    assert ask(generator(server)).attempts == 3
    first, second, third = server.times
    assert second - first >= 0.4 and third - second >= 0.4


@pytest.mark.parametrize("wanted, low, high", [("7", 7, 7.7), ("0", 0.5, 1.0), ("soon", 0.5, 1.0), (None, 0.5, 1.0)])
def test_pauses(wanted, low, high):
    assert all(low <= module._pause(1, wanted) <= high for _ in range(50))


def test_pauses_double_up_to_a_limit_with_jitter():
    for attempt in (1, 2, 3, 4, 10):
        full = min(60.0, 2.0 ** (attempt - 1))
        drawn = {module._pause(attempt, None) for _ in range(50)}
        assert len(drawn) > 40 and full / 2 <= min(drawn) and max(drawn) <= full
    date = module.email.utils.formatdate(time.time() + 30, usegmt=True)
    assert 28 <= module._pause(1, date) <= 33


@pytest.mark.parametrize("fault, kind", [("refused", EndpointRefused), ("too_long", ContextFull)])
def test_what_cannot_pass_is_not_tried_again(server, fault, kind):
    server.always = fault
    with pytest.raises(kind):
        ask(generator(server))
    assert len(server.requests) == 1


def test_a_call_ends_in_time(server):
    server.always = "slow"
    started = time.monotonic()
    with pytest.raises(EndpointSlow, match="within 0.5 s and 1 attempts"):
        ask(generator(server), within_s=0.5)
    assert time.monotonic() - started < 5
    server.always = "limited"                               # asks for more time than there is
    with pytest.raises(EndpointSlow, match="HTTP 429"):
        ask(generator(server), within_s=0.3)


def test_requests_per_minute_hold_across_threads(server):
    made = generator(server, requests_per_minute=1200)      # one every 50 ms
    threads = [threading.Thread(target=ask, args=(made,)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    times = sorted(server.times)
    assert len(times) == 8 and times[-1] - times[0] >= 7 * 0.05 - 0.03


def test_cost_counts_cached_tokens_at_their_price(server):
    prices = {"input": 2.0, "cached_input": 0.5, "output": 10.0}
    assert ask(generator(server, prices=prices)).cost == pytest.approx((60 * 2.0 + 40 * 0.5 + 7 * 10.0) / 1e6)
    assert ask(generator(server, prices={"input": 2.0, "output": 10.0})).cost == pytest.approx((100 * 2.0 + 70.0) / 1e6)
    assert ask(generator(server)).cost is None
    server.plan = ["uncounted"]
    reply = ask(generator(server, prices=prices))
    assert (reply.cost, reply.prompt_tokens, reply.sampled_tokens) == (None, None, None)


@pytest.mark.parametrize("settings, words", [
    ({"prices": {"input": 1}}, "prices needs input and output"), ({"calls": "xml"}, "'message'"), ({"attempts": 0}, "at least 1"),
    ({"prices": {"input": 1, "output": 1, "put": 2}}, "prices needs")])
def test_settings_that_do_not_fit(server, settings, words):
    with pytest.raises(ValueError, match=words):
        generator(server, **settings)


# ---- episodes -------------------------------------------------------------------------------------------------------
def test_an_evaluation_through_the_server(server):
    rows = play(server, seeds=(0, 1), instances=3, made=generator(server, prices={"input": 1.0, "output": 1.0}))
    assert len(rows) == 6 and rows["success"].all() and (rows["turns"] == 2).all() and (rows["status"] == "completed").all()
    one = rows.iloc[0]
    assert (one["prompt_tokens"], one["sampled_tokens"], one["tokens"], one["attempts"], one["served"]) == (200, 14, 107, 2, "served-model")
    assert one["cost"] == pytest.approx(214 / 1e6)
    wanted = {stable_seed(seed, TASK, instance, turn) & 0x7FFFFFFF for seed in (0, 1) for instance in rows["instance"].unique()
              for turn in (0, 1)}
    assert len(wanted) == 12 and {body["seed"] for body in server.requests} == wanted
    assert {body["temperature"] for body in server.requests} == {0.8}


def test_the_history_that_the_server_gets_back(server):
    play(server)
    history = server.requests[1]["messages"]
    assert [entry["role"] for entry in history] == ["system", "user", "assistant", "tool"]
    call, = history[2]["tool_calls"]
    assert call["function"] == {"name": "look", "arguments": json.dumps({"word": history[1]["content"]})}
    assert history[3]["tool_call_id"] == call["id"] == "call_a" and set(history[3]) == {"role", "tool_call_id", "content"}


@pytest.mark.parametrize("said, words", [
    (message("exec_sql", "{}"), "unknown tool 'exec_sql'; the tools are: look, answer"),
    (message("look", '{"word": "app'), "arguments is text that is not a JSON object"),
    (message("look", "[1]"), "arguments must be a JSON object"), (message("look", "{}"), "missing argument 'word'"),
    (message("look", {"word": 5, "x": 1}), "unknown argument 'x'"), (message(content=None), None),
    ({"role": "assistant", "tool_calls": [{"function": {"name": "", "arguments": "{}"}}]}, "the tool call has no name"),
])
def test_an_agents_mistake_is_its_own_and_the_episode_goes_on(server, said, words):
    server.plan = [said]
    rows = play(server)
    assert rows["success"].all() and rows["turns"].item() == 3 and rows["invalid_calls"].item() == 1
    history = server.requests[1]["messages"]
    for call in history[2].get("tool_calls", []):
        assert isinstance(json.loads(call["function"]["arguments"]), dict) and call["function"]["name"]
    assert history[-1]["role"] == ("tool" if "tool_calls" in history[2] else "user")
    assert words is None or words in history[-1]["content"]


def test_every_call_is_answered_once_in_order_before_anything_else():
    two = message("look", "{}")["tool_calls"] + message("answer", "{}")["tool_calls"]     # the same id twice, and one without
    reply = module.ChatReply({"content": None, "tool_calls": [*two, {"function": {"name": "a b!", "arguments": None}}, "junk"]}, "stop")
    said, kept = spoken(reply, 3)
    assert [call["id"] for call in kept["tool_calls"]] == ["call_a", "call_3_1", "call_3_2", "call_3_3"]
    assert [call["function"]["name"] for call in kept["tool_calls"]] == ["look", "answer", "a_b_", "none"]
    assert {call["function"]["arguments"] for call in kept["tool_calls"]} == {"{}"}
    assert [call["function"].get("name") for call in said["tool_calls"]] == ["look", "answer", "a b!", None]
    user, tool = {"role": "user", "content": "page"}, {"role": "tool", "content": "seen", "tool_call_id": "call_3_1"}
    assert [(entry["role"], entry.get("tool_call_id"), entry["content"]) for entry in answered(kept, [user, tool])] == [
        ("tool", "call_a", NOT_RUN), ("tool", "call_3_1", "seen"), ("tool", "call_3_2", NOT_RUN), ("tool", "call_3_3", NOT_RUN),
        ("user", None, "page")]


def test_calls_as_text_for_servers_that_do_not_parse_them(server):
    text = '<tool_call>{"name": "look", "arguments": {"word": "x"}}</tool_call>'
    server.plan = [message(content=text)] * 2
    rows = play(server, made=generator(server, calls="text"))
    assert (rows["turns"].item(), rows["invalid_calls"].item(), rows["success"].item()) == (4, 0, True)    # two as text, two as calls
    assert [entry["role"] for entry in server.requests[1]["messages"]] == ["system", "user", "assistant", "tool"]
    server.plan = [message(content=text)]
    assert play(server)["invalid_calls"].item() == 1        # by default only tool_calls are calls


def test_a_full_context_is_the_agents_ending(server):
    server.plan = ["too_long"]
    rows = play(server)
    assert (rows["status"].item(), rows["success"].item(), rows["reward"].item()) == ("agent context limit", False, 0.0)
    rows = play(server, max_tokens=108)                     # 107 are used after the first answer
    assert (rows["status"].item(), rows["turns"].item()) == ("agent context limit", 1)


def test_a_server_that_is_down_is_an_infrastructure_fault(server, tmp_path):
    server.always = "broken"
    with pytest.raises(EnvFault, match="2 of 2 episodes failed by infrastructure.*model error: EndpointError.*HTTP 500") as caught:
        play(server, instances=2, out=tmp_path, made=generator(server, attempts=2))
    assert caught.value.rows["reward"].isna().all() and set(caught.value.rows["status"]) == {"model error"}
    server.always = None
    rows = play(server, instances=2, out=tmp_path)
    assert rows["success"].all() and set(rows["attempt"]) == {2} and len((tmp_path / "episodes.jsonl").read_text().splitlines()) == 2


def test_a_wrong_key_stops_the_evaluation_and_loses_nothing(server, tmp_path):
    play(server, instances=2, out=tmp_path)
    server.always = "refused"
    before = len(server.requests)
    with pytest.raises(EndpointRefused, match="HTTP 401"):
        play(server, instances=8, out=tmp_path)
    assert len(server.requests) - before <= 4               # not one per episode
    server.always = None
    assert len(play(server, instances=8, out=tmp_path)) == 8


def test_a_server_that_hangs_ends_the_episode_in_time(server):
    server.plan = ["slow"]
    started = time.monotonic()
    with pytest.raises(EnvFault, match="model call time limit") as caught:
        play(server, instances=3, concurrency=1, call_s=1.0)
    assert sorted(caught.value.rows["status"]) == ["completed", "completed", "model call time limit"]
    assert time.monotonic() - started < 15
    server.plan = ["slow"]
    with pytest.raises(EnvFault, match="episode time limit"):
        play(server, concurrency=1, episode_s=1.0)
