"""AgentRL's protocol both ways: our controller, its times and refusals, and the adapter that plays on a controller."""

import asyncio
import base64
import json
import os
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

httpx = pytest.importorskip("httpx")
starlette = pytest.importorskip("starlette")
uvicorn = pytest.importorskip("uvicorn")

import envs  # noqa: E402
from envs.base import EnvFault, Status, assistant_call  # noqa: E402
from envs.commands import serve  # noqa: E402
from envs.remote_env import remote_class  # noqa: E402
from envs.serving.app import make_app  # noqa: E402
from envs.serving.controller import Controller, ProtocolError, Timers  # noqa: E402
from envs.serving.workers import LocalWorker  # noqa: E402
from envs.tool_calls import render_turn  # noqa: E402
from toy_env import LookupEnv  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
SIZE = {"split": "test", "size": "micro"}


class Unruly(LookupEnv):
    """Sleeps, breaks, or falls silent on demand."""

    task = "unruly"
    closed = 0

    def _call(self, call):
        if call.name == "look" and call.arguments["word"].startswith("sleep"):
            time.sleep(float(call.arguments["word"][5:]))
            return "slept"
        if call.name == "look" and call.arguments["word"] == "fault":
            raise EnvFault("the disk is on fire")
        if call.name == "look" and call.arguments["word"] == "bug":
            raise KeyError("bug")
        return super()._call(call)

    def close(self):
        Unruly.closed += 1


def look(word):
    return {"role": "assistant", "content": "", "tool_calls": [
        {"id": "c1", "type": "function", "function": {"name": "look", "arguments": json.dumps({"word": word})}}]}


class Clock:
    now = 1000.0

    def __call__(self):
        return self.now


def controller(capacity=2, clock=None, **timers):
    return Controller([LocalWorker("unruly-std", lambda: Unruly(**SIZE), capacity)], Timers(**timers), clock=clock or time.time)


async def refusal(call, status, part):
    with pytest.raises(ProtocolError, match=part) as caught:
        await call
    assert caught.value.status == status


# ---- the controller ---------------------------------------------------------------------------------------------------
def test_a_sample_is_played_to_its_end_and_then_refuses():
    async def play():
        server = controller()
        session, opening = await server.start_sample("unruly-std", 3)
        data = Unruly(**SIZE).instances[3].data
        assert opening["messages"][1]["content"] == data["word"] and len(opening["tools"]) == 2
        answer = await server.interact(str(session), [look(data["word"])])
        assert answer == {"finish": False, "reward": 0.0, "status": "running", "metrics": {}, "messages": [
            {"role": "tool", "content": data["number"], "name": "look", "tool_call_id": "c1"}]}
        assert server.list_sessions()[str(session)]["index"] == 3
        end = assistant_call("answer", value=data["number"])
        answer = await server.interact(session, [end])
        assert (answer["finish"], answer["reward"], answer["status"], answer["metrics"]) == (True, 1.0, "completed",
                                                                                             {"score": 1.0})
        await refusal(server.interact(session, [end]), 400, "has ended")
        assert server.list_sessions() == {} and server.workers["unruly-std@here"].current == 0
        await server.close()
    asyncio.run(play())


@pytest.mark.parametrize("name, index, part", [
    ("unruly-st", 0, "did you mean 'unruly-std'"), (None, 0, "unknown task"), ("unruly-std", 8, "unknown index '8'"),
    ("unruly-std", -1, "unknown index"), ("unruly-std", "0", "unknown index"), ("unruly-std", None, "unknown index"),
    ("unruly-std", [], "unknown index")])
def test_unknown_names_and_indices_are_refused(name, index, part):
    async def play():
        server = controller()
        await refusal(server.start_sample(name, index), 400, part)
        await server.close()
    asyncio.run(play())


@pytest.mark.parametrize("messages", [None, [], "text", [{}], [{"role": "user", "content": "x"}], [look("a"), 3]])
def test_only_assistant_messages_are_taken(messages):
    async def play():
        server = controller()
        session, _ = await server.start_sample("unruly-std", 0)
        await refusal(server.interact(session, messages), 400, "list of assistant messages")
        assert (await server.interact(session, [look("apple")]))["finish"] is False
        for unknown in (None, "x", session + 1):
            await refusal(server.interact(unknown, [look("a")]), 400, "no such session")
        await server.close()
    asyncio.run(play())


def test_one_interaction_at_a_time_and_no_more_samples_than_slots():
    async def play():
        server = controller()
        session, _ = await server.start_sample("unruly-std", 0)
        first = asyncio.create_task(server.interact(session, [look("sleep0.2")]))
        await asyncio.sleep(0.05)
        await refusal(server.interact(session, [look("a")]), 400, "still executing")
        assert (await first)["messages"][0]["content"] == "slept"
        other, _ = await server.start_sample("unruly-std", 0)
        await refusal(server.start_sample("unruly-std", 0), 400, "all 2 slots are taken")
        await server.cancel(other)
        await server.start_sample("unruly-std", 0)
        await server.close()
    asyncio.run(play())


def test_a_call_that_takes_too_long_ends_the_sample_and_its_slot_comes_back_when_it_is_done():
    async def play():
        Unruly.closed = 0
        server = controller(capacity=1, interact_s=0.1)
        session, _ = await server.start_sample("unruly-std", 0)
        await refusal(server.interact(session, [look("sleep0.5")]), 500, "no answer within 0.1 s")
        await refusal(server.interact(session, [look("a")]), 400, "no such session")
        await refusal(server.start_sample("unruly-std", 0), 400, "slots are taken")
        await asyncio.sleep(0.6)
        assert Unruly.closed == 1                            # the one that hung is not used again
        await server.start_sample("unruly-std", 0)
        await server.close()
    asyncio.run(play())


def test_faults_are_the_wires_task_error_and_bugs_end_only_their_own_sample():
    async def play():
        server = controller()
        session, _ = await server.start_sample("unruly-std", 0)
        answer = await server.interact(session, [look("fault")])
        assert (answer["status"], answer["reward"], answer["metrics"]) == ("task error", 0.0, {"fault": "the disk is on fire"})
        session, _ = await server.start_sample("unruly-std", 0)
        other, _ = await server.start_sample("unruly-std", 1)
        with pytest.raises(KeyError):
            await server.interact(session, [look("bug")])
        assert list(server.list_sessions()) == [str(other)]
        assert server.workers["unruly-std@here"].current == 1
        await server.close()
    asyncio.run(play())


def test_idle_sessions_expire_and_finished_ones_are_forgotten():
    async def play():
        clock = Clock()
        server = controller(clock=clock, session_s=300, finished_s=600)
        idle, _ = await server.start_sample("unruly-std", 0)
        done, _ = await server.start_sample("unruly-std", 1)
        await server.interact(done, [assistant_call("answer", value="?")])
        clock.now += 299
        await server.clean()
        assert set(server.sessions) == {idle, done}
        clock.now += 2
        await server.clean()
        assert set(server.sessions) == {done} and server.workers["unruly-std@here"].current == 0
        clock.now += 300
        await server.clean()
        assert server.sessions == {}
        await server.close()
    asyncio.run(play())


@pytest.mark.parametrize("how", ["cancel", "cancel_all", "expire"])
def test_a_sample_that_is_ended_early_leaves_no_world_behind(how):
    """Its environment is closed then, not when its place is next taken."""
    async def play():
        Unruly.closed, clock = 0, Clock()
        server = controller(clock=clock, session_s=300)
        session, _ = await server.start_sample("unruly-std", 0)
        await server.interact(session, [look("apple")])
        if how == "cancel":
            await server.cancel(session)
        elif how == "cancel_all":
            await server.cancel_all("unruly-std", force=False)
        else:
            clock.now += 301
            await server.clean()
        await asyncio.sleep(0.2)
        assert (Unruly.closed, server.sessions, server.workers["unruly-std@here"].current) == (1, {}, 0)
        done, _ = await server.start_sample("unruly-std", 1)
        assert (await server.interact(done, [assistant_call("answer", value="?")]))["finish"]
        assert Unruly.closed == 1                            # one that ended by itself is used again
        await server.close()
    asyncio.run(play())


def test_a_sample_cancelled_between_two_messages_plays_no_further():
    async def play():
        Unruly.closed = 0
        server = controller()
        session, _ = await server.start_sample("unruly-std", 0)
        running = asyncio.create_task(server.interact(session, [look("sleep0.2"), look("sleep0.2")]))
        await asyncio.sleep(0.05)
        await server.cancel(session)
        await refusal(running, 500, "cancelled")
        await asyncio.sleep(0.1)
        assert Unruly.closed == 1 and server.workers["unruly-std@here"].current == 0
        await server.close()
    asyncio.run(play())


def test_stale_workers_get_nothing_new_and_cancel_all_needs_a_name_among_several():
    async def play():
        server = Controller([LocalWorker(name, lambda: Unruly(**SIZE), 2) for name in ("a-std", "b-std")])
        session, _ = await server.start_sample("a-std", 0)
        await refusal(server.cancel_all(None, force=False), 403, "several tasks")
        await server.cancel_all("b-std", force=False)
        assert session in server.sessions
        await server.cancel_all(None, force=True)
        assert server.sessions == {}
        server.mark_stale("a-std", "a-std@here", True)
        await refusal(server.start_sample("a-std", 0), 400, "no live worker")
        assert server.list_workers()["a-std"]["workers"]["a-std@here"]["stale"] is True
        server.mark_stale("a-std", "a-std@here", False)
        await server.start_sample("a-std", 0)
        with pytest.raises(ProtocolError, match="takes no workers"):
            server.receive_heartbeat("c", "http://127.0.0.1:1/api", 1, [0])
        await server.close()
    asyncio.run(play())


# ---- over HTTP ----------------------------------------------------------------------------------------------------------
class Live:
    """A server in a thread."""

    def __init__(self, workers, token=None, timers=None):
        self.app = make_app(workers, token=token, timers=timers)
        self.server = uvicorn.Server(uvicorn.Config(self.app, host="127.0.0.1", port=0, log_level="error"))
        self.thread = threading.Thread(target=self.server.run, daemon=True)

    def __enter__(self):
        self.thread.start()
        deadline = time.monotonic() + 20
        while not self.server.started:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        self.port = self.server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}/api"
        return self

    def __exit__(self, *exc):
        self.server.should_exit = True
        self.thread.join(20)
        assert not self.thread.is_alive()


@pytest.fixture
def live():
    with Live([LocalWorker("unruly-std", lambda: Unruly(**SIZE), 4)]) as server:
        yield server


def test_the_routes(live):
    with httpx.Client(base_url=live.url, trust_env=False) as client:
        assert client.get("/version").json() == {"variant": "nova", "version": 1}
        assert client.get("/get_indices", params={"name": "unruly-std"}).json() == list(range(8))
        response = client.post("/start_sample", json={"name": "unruly-std", "index": 2})
        session = {"session_id": response.headers["session_id"]}
        assert set(response.json()) == {"messages", "tools"}
        assert client.post("/interact", headers=session, json={"messages": [look("apple")]}).status_code == 200
        assert list(client.get("/list_sessions").json()) == [session["session_id"]]
        assert client.get("/list_workers").json()["unruly-std"]["workers"]["unruly-std@here"]["current"] == 1
        assert client.post("/cancel", headers=session).json() is None
        for path in ("sync_all", "clean_worker", "clean_session", "cancel_all", "cancel_notice"):
            assert client.post(f"/{path}").json() is None
        assert client.post("/interact", headers=session, json={"messages": [look("a")]}).status_code == 400
        assert client.post("/start_sample", content=b"{not json").status_code == 400
        assert client.post("/start_sample", content=b"[1]").status_code == 400
        assert client.post("/start_sample", content=b" " * (17 << 20)).status_code == 413
        assert client.post("/start_sample", json={"name": "unruly-std", "index": 2},
                           headers={"host": "evil.example"}).status_code == 400
        page = {"origin": "http://127.0.0.1:8000", "content-type": "text/plain"}       # needs no leave of ours to be sent
        assert client.post("/cancel_all", json={}, headers=page).status_code == 403
        assert client.get("/start_sample").status_code == 405 and client.get("/nothing").status_code == 404


def test_a_token_is_asked_for_on_every_route():
    with Live([LocalWorker("unruly-std", lambda: Unruly(**SIZE), 1)], token="s3cret") as server:
        basic = "Basic " + base64.b64encode(b"s3cret:").decode()
        for given, status in ((None, 401), ("Bearer wrong", 401), ("Basic %%%", 401), ("Bearer s3cret", 200), (basic, 200)):
            headers = {"Authorization": given} if given else {}
            for method, path in (("GET", "version"), ("POST", "clean_session"), ("GET", "list_workers")):
                assert httpx.request(method, f"{server.url}/{path}", headers=headers, trust_env=False).status_code == status
        env = remote_class("locked", server.url, "unruly-std", token="s3cret")()
        assert len(env.instances) == 8
        env.close()
        with pytest.raises(EnvFault, match="answered 401"):
            remote_class("locked", server.url, "unruly-std")()


def test_listening_elsewhere_needs_a_token(monkeypatch, tmp_path):
    monkeypatch.delenv(serve.TOKEN_VARIABLE, raising=False)
    with pytest.raises(ValueError, match="--host 0.0.0.0 can be reached from elsewhere and needs a token"):
        serve.main(["--host", "0.0.0.0", "--tasks", "os"])
    assert [serve.is_loopback(host) for host in ("127.0.0.1", "::1", "localhost", "0.0.0.0",
                                                 "example.org")] == [True] * 3 + [False] * 2
    (tmp_path / "token").write_text("abc\n")
    assert serve.read_token(str(tmp_path / "token")) == "abc"
    assert [serve.served_name(task, "test") for task in envs.TASKS] == ["alfworld-std", "dbbench-std", "kg-std", "os-std",
                                                                        "webshop-std"]


def descendants(pid):
    """{process id: command line} of what `pid` has started, zombies left out."""
    listed = subprocess.run(["ps", "-e", "-o", "pid=,ppid=,stat=,args="], capture_output=True, text=True, check=True).stdout
    rows = [line.split(None, 3) for line in listed.splitlines()]
    family = {pid}
    while (grown := family | {int(row[0]) for row in rows if int(row[1]) in family}) != family:
        family = grown
    return {int(row[0]): row[3] for row in rows if int(row[0]) in family - {pid} and not row[2].startswith("Z")}


def bash(script):
    return {"role": "assistant", "content": "", "tool_calls": [
        {"id": "c1", "type": "function", "function": {"name": "bash_action", "arguments": json.dumps({"script": script})}}]}


@pytest.mark.skipif(not envs.available("os")[0], reason=f"no sandbox here: {envs.available('os')[1]}")
@pytest.mark.parametrize("how", ["cancel", "expire"])
def test_what_a_shell_left_running_ends_with_its_session(how):
    make = lambda: envs.make("os", size="micro", split="test")  # noqa: E731
    with Live([LocalWorker("os-std", make, 4)], timers=Timers(session_s=0.5 if how == "expire" else 300.0, clean_s=0.1)) as server:
        with httpx.Client(base_url=server.url, trust_env=False, timeout=60) as client:
            session = {"session_id": client.post("/start_sample", json={"name": "os-std", "index": 0}).headers["session_id"]}
            script = "sleep 47113 & (setsid sleep 47113 &); echo started"
            answer = client.post("/interact", headers=session, json={"messages": [bash(script)]}).json()
            assert answer["messages"][0]["content"] == "started"
            if how == "cancel":
                assert sum(line == "sleep 47113" for line in descendants(os.getpid()).values()) == 2
                client.post("/cancel", headers=session)
            until(lambda: client.get("/list_sessions").json() == {}, 20)
            until(lambda: not any(line == "sleep 47113" for line in descendants(os.getpid()).values()), 20)
            assert client.post("/interact", headers=session, json={"messages": [bash("true")]}).status_code == 400


@pytest.mark.extended
@pytest.mark.skipif(not envs.available("os")[0], reason=f"no sandbox here: {envs.available('os')[1]}")
def test_a_killed_server_leaves_nothing_running(tmp_path):
    port = free_port()
    server = command("-m", "envs", "serve", "--size", "micro", "--port", port, "--tasks", "os", "db", cwd=tmp_path)
    with httpx.Client(base_url=f"http://127.0.0.1:{port}/api", trust_env=False, timeout=60) as client:
        until(lambda: client.get("/version").status_code == 200)
        for name in ("os-std", "dbbench-std"):
            for index in range(3):
                session = client.post("/start_sample", json={"name": name, "index": index}).headers["session_id"]
                if name == "os-std":
                    client.post("/interact", headers={"session_id": session}, json={"messages": [bash("setsid sleep 999 &")]})
        inside = descendants(server.pid)
        assert sum(line == "sleep 999" for line in inside.values()) == 3
        server.kill()
        server.wait()
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in inside), 20)


def test_a_file_or_port_that_cannot_be_had_is_one_line(capsys):
    from envs.__main__ import main

    assert main(["serve", "--tasks", "db", "--token-file", "/nowhere/token"]) == 2
    assert capsys.readouterr().err.splitlines() == ["[Errno 2] No such file or directory: '/nowhere/token'"]


# ---- the adapter ----------------------------------------------------------------------------------------------------------
def test_the_adapter_plays_what_the_environment_itself_plays(live):
    remote, local = remote_class("far", live.url, "unruly-std")(), Unruly(**SIZE)
    for index in range(8):
        assert remote.reset(index) == local.reset(index)
        for turn in local.oracle(index)[:index % 2 + 1]:
            for form in (render_turn(turn), turn) if index % 2 == 0 else (turn,):
                there, here = remote.step(form), local.step(form)
                texts = [[message["content"] for message in result.messages] for result in (there, here)]
                assert texts[0] == texts[1]
                assert (there.reward, there.score or 0.0, there.status, there.done) == (
                    here.reward, here.score or 0.0, here.status, here.done)
    assert remote.step("again") == there
    remote.close()


def test_garbage_limits_and_faults_reach_the_adapter(live):
    remote = remote_class("far", live.url, "unruly-std")()
    remote.reset(0)
    result = remote.step('<tool_call>{"name": "lok", "arguments": {}}</tool_call>')
    assert "unknown tool" in result.messages[0]["content"] and result.info["invalid_calls"] == 1
    for _ in range(3):
        result = remote.step("no call at all")
    assert (result.status, result.truncated, result.reward) == (Status.TASK_LIMIT, True, 0.0)
    remote.reset(0)
    result = remote.step(look("fault"))
    assert (result.status, result.info["error"]) == (Status.ENVIRONMENT_ERROR, "the disk is on fire")
    remote.reset(0)
    result = remote.step(look("bug"))
    assert result.status == Status.ENVIRONMENT_ERROR and "answered 500" in result.info["error"]
    remote.reset(0)
    remote.reset(1)                                          # ends the first sample
    assert len(httpx.get(f"{live.url}/list_sessions", trust_env=False).json()) == 1
    remote.close()
    assert httpx.get(f"{live.url}/list_sessions", trust_env=False).json() == {}


def test_a_controller_that_is_not_there_is_a_fault():
    with pytest.raises(EnvFault, match="ConnectError"):
        remote_class("nowhere", "http://127.0.0.1:9/api", "os-std")()


# ---- the published packages as the other side -------------------------------------------------------------------------------
AGENT = textwrap.dedent('''
    """An OpenAI endpoint that knows every problem by its opening message and plays it with some of its answers wrong."""
    import json, sys
    import envs, uvicorn
    from starlette.applications import Starlette
    from starlette.responses import JSONResponse
    from starlette.routing import Route

    SCRIPTS = {}
    for task in sys.argv[2].split(","):
        env = envs.make(task, size="micro", split="test", rules="agentbench")
        for index in range(int(sys.argv[3])):
            opening = env.reset(index)[1]["content"]
            SCRIPTS[opening] = env.oracle(index) if index % 3 else env.oracle(index)[:-1]
        env.close()

    async def chat(request):
        body = await request.json()
        users = [message["content"] for message in body["messages"] if message["role"] == "user"]
        text = users[0] if isinstance(users[0], str) else users[0][0]["text"]
        done = sum(message["role"] == "assistant" for message in body["messages"])
        message = {"role": "assistant", "content": "done"}
        if text in SCRIPTS and done < len(SCRIPTS[text]):
            message = dict(SCRIPTS[text][done])
            message["tool_calls"] = [dict(call, id=f"call_{done}_{number}", function=dict(
                call["function"], arguments=json.dumps(call["function"]["arguments"])))
                for number, call in enumerate(message.get("tool_calls") or [])] or None
        return JSONResponse({"id": "x", "object": "chat.completion", "created": 0, "model": "script", "choices": [
            {"index": 0, "message": message, "finish_reason": "stop"}],
            "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}})

    async def models(request):
        return JSONResponse({"object": "list", "data": [{"id": "script", "object": "model", "created": 0, "owned_by": "x"}]})

    uvicorn.run(Starlette(routes=[Route("/v1/chat/completions", chat, methods=["POST"]), Route("/v1/models", models)]),
                host="127.0.0.1", port=int(sys.argv[1]), log_level="error")
''')
WORKER = textwrap.dedent('''
    """A task of AgentRL's worker: one of our environments, played through the package's own Session."""
    from agentrl.worker.task import Task
    from agentrl.worker.typings import RewardHistoryItem, SampleStatus, TaskSampleExecutionResult
    import envs

    class Wrapped(Task):
        def __init__(self, task, **settings):
            self.make = lambda: envs.make(task, size="micro", split="test", rules="agentbench")
            self.count = len(self.make().instances)
            super().__init__(tools=self.make().tools, **settings)

        def get_indices(self):
            return list(range(self.count))

        def sync_start_sample(self, index, session):
            env = self.make()
            try:
                messages = env.reset(index)
                while True:
                    for message in messages:
                        session.inject(message | ({"tool_call_id": "call"} if message["role"] == "tool" and
                                                  "tool_call_id" not in message else {}))
                    for message in session.sync_action().messages:
                        result = env.step(message)
                    if result.done:
                        session.inject(RewardHistoryItem(reward=result.reward, score=result.score))
                        return TaskSampleExecutionResult(status=SampleStatus(str(result.status)))
                    messages = result.messages
            finally:
                env.close()
''')
PLAYED = 9


def free_port():
    import socket
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def until(condition, seconds=180.0):
    deadline = time.monotonic() + seconds
    while True:
        try:
            if condition():
                return
        except httpx.HTTPError:
            pass
        assert time.monotonic() < deadline, "it did not come up"
        time.sleep(0.1)


def command(*words, **settings):
    environment = os.environ | {"PYTHONPATH": str(ROOT), "NO_PROXY": "127.0.0.1"}
    return subprocess.Popen([sys.executable, *map(str, words)], env=environment, **settings)


def rewards_here(task):
    """What the scripted agent earns in process."""
    with envs.make(task, size="micro", split="test", rules="agentbench") as env:
        found = {}
        for index in range(PLAYED):
            env.reset(index)
            for turn in env.oracle(index) if index % 3 else env.oracle(index)[:-1]:
                result = env.step(turn)
            while not result.done:
                result = env.step("done")
            found[index] = (result.reward, str(result.status))
        return found


@pytest.mark.extended
def test_agentrl_eval_earns_here_what_is_earned_in_process(tmp_path):
    pytest.importorskip("agentrl.eval")
    tasks = [task for task in envs.TASKS if envs.available(task)[0]]
    port, agent_port = free_port(), free_port()
    (tmp_path / "agent.py").write_text(AGENT)
    server = command("-m", "envs", "serve", "--size", "micro", "--port", port, "--tasks", *tasks)
    agent = command(tmp_path / "agent.py", agent_port, ",".join(tasks), PLAYED)
    try:
        until(lambda: httpx.get(f"http://127.0.0.1:{port}/api/version", trust_env=False).status_code == 200)
        until(lambda: httpx.get(f"http://127.0.0.1:{agent_port}/v1/models", trust_env=False).status_code == 200)
        names = [serve.served_name(task, "test") for task in tasks]
        done = command("-m", "agentrl.eval", "-c", f"http://127.0.0.1:{port}/api/", "-u", f"http://127.0.0.1:{agent_port}/v1",
                       "--chat-completions", "--api-key", "none", "--indices-range", f"0-{PLAYED - 1}", "-o", tmp_path / "out",
                       "-j", 4, "--no-interactive", *names, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                       cwd=tmp_path)
        log, _ = done.communicate(timeout=280)
        assert done.returncode == 0, log
        found = {}
        for file in (tmp_path / "out").rglob("*.jsonl"):
            for line in file.read_text().splitlines():
                row = json.loads(line)
                found.setdefault(row["task"], {})[row["index"]["int_value"]] = (row["metric_reward"], row["status"])
        assert found == {serve.served_name(task, "test"): rewards_here(task) for task in tasks}, log[-3000:]
    finally:
        for process in (server, agent):
            process.terminate()
            process.wait(60)


@pytest.mark.extended
@pytest.mark.parametrize("task", envs.TASKS)
def test_the_adapter_earns_on_an_official_worker_what_is_earned_in_process(tmp_path, task):
    pytest.importorskip("agentrl.worker")
    if not envs.available(task)[0]:
        pytest.skip(f"{task} cannot run here")
    (tmp_path / "wrapped_task.py").write_text(WORKER)
    (tmp_path / "config.yaml").write_text(json.dumps({"default": {}, "far-std": {
        "module": "wrapped_task.Wrapped", "parameters": {"name": "far-std", "task": task, "concurrency": 4}}}))
    port = free_port()
    with Live([]) as server:
        environment = os.environ | {"PYTHONPATH": f"{ROOT}:{tmp_path}"}
        worker = subprocess.Popen([sys.executable, "-m", "agentrl.worker", "far-std", "--config", str(tmp_path / "config.yaml"),
                                   "--controller", server.url, "--self", f"http://127.0.0.1:{port}/api", "--host", "127.0.0.1",
                                   "--port", str(port), "--log-level", "WARNING"], env=environment, cwd=tmp_path)
        try:
            until(lambda: "far-std" in httpx.get(f"{server.url}/list_workers", trust_env=False).json())
            remote, local = remote_class("far", server.url, "far-std")(), envs.make(task, size="micro", split="test")
            found = {}
            for index in range(PLAYED):
                remote.reset(index)
                for turn in local.oracle(index) if index % 3 else local.oracle(index)[:-1]:
                    result = remote.step(render_turn(turn))
                while not result.done:
                    result = remote.step("done")
                found[index] = (result.reward, str(result.status))
            assert found == rewards_here(task)
            remote.reset(0)
            remote.close()                                   # cancels on the worker
            until(lambda: server.app.state.controller.workers[f"far-std@http://127.0.0.1:{port}/api"].current == 0, 5)
            local.close()
        finally:
            worker.terminate()
            worker.wait(20)
