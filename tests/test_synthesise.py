"""Self-Instruct: a scripted endpoint proposes, the environments decide; every reason to drop is met and counted."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

import envs
from envs.__main__ import main as envs_main
from envs.base import EnvFault
from envs.commands import synthesise
from envs.instances import load_instances
from envs.proposals import read_proposals, rouge_l
from envs.os_env import OSEnv
from envs.synthesis import Synthesis, as_example
from eppo.config import load_recipe
from eppo.warm_start import cache_key, make_env

needs_sandbox = pytest.mark.skipif(not envs.available("os")[0], reason=f"no sandbox here: {envs.available('os')[1]}")
TABLE = {"name": "ships", "columns": [["ship", "TEXT"], ["berth", "TEXT"]],
         "rows": [["Heron", "4"], ["Osprey", "7"], ["Gannet", "9"]]}


def db(question, sql, table=TABLE):
    return {"question": question, "table": table, "sql": sql}


def shell(question, init, solution):
    return {"question": question, "init": init, "solution": solution}


@pytest.mark.parametrize("left, right, value", [
    ("a b c", "a b c", 1.0), ("a b c d", "a c", 2 / 3), ("A, b!", "a B", 1.0), ("a b", "c d", 0.0), ("", "", 0.0), ("a", "",
                                                                                                                    0.0),
    ("a b c", "c b a", 1 / 3)])
def test_rouge_l(left, right, value):
    assert rouge_l(left, right) == pytest.approx(value)


@pytest.mark.parametrize("text, found", [
    ('{"a": 1}\n{"a": 2}', [{"a": 1}, {"a": 2}]), ('[{"a": 1}, 3]', [{"a": 1}, None]), ('```json\n{"a": 1}\n```', [{"a": 1}]),
    ('Sure!\n{"a": 1}\n\n{"a": ', [None, {"a": 1}, None]), ("", []), ("7", [None]), ("[" * 100_000, [None])])
def test_proposals_are_read_line_by_line(text, found):
    assert list(read_proposals(text)) == found


def judged(task, proposals, **settings):
    answers = iter(proposals)
    synthesis = Synthesis(task, lambda messages: "\n".join(
        entry if isinstance(entry, str) else json.dumps(entry) for entry in next(answers)), **settings)
    for _ in proposals:
        synthesis.round(4)
    synthesis.close()
    return synthesis


def test_databases_keep_what_proves_itself():
    test_question = envs.make("db", size="small", split="test").instances[5].data["question"]
    found = judged("db", [[
        db("Where does the Heron lie?", "SELECT berth FROM ships WHERE ship = 'Heron'"),
        db("Move the Gannet over to berth twelve, please.", "UPDATE ships SET berth = '12' WHERE ship = 'Gannet'"),
        db("Name all vessels beyond pier five.", "SELECT ship FROM ships WHERE berth > 5"),
        db("Where, then, does the Heron lie?", "SELECT berth FROM ships WHERE ship = 'Heron'"),
        db(test_question, "SELECT berth FROM ships"), db("Which boat sank?", "SELECT nothing FROM ships"),
        db("Who owns them?", "SELECT ship, berth FROM ships"), db("Any at one?", "SELECT ship FROM ships WHERE berth = '1'"),
        db("Rename nothing at all today.", "UPDATE ships SET berth = '4' WHERE ship = 'Heron'"),
        db("Bad rows everywhere?", "SELECT 1", TABLE | {"rows": [["x"]]}), db("", "SELECT 1"), {"question": "Only this?"},
                           "prose"]])
    assert [item.data["question"].split()[0] for item in found.kept] == ["Where", "Move", "Name"]
    assert found.kept[0].data["label"] == ["4"] and found.kept[1].data["changes"] and found.kept[2].data["label"] == ["Osprey",
                                                                                                                      "Gannet"]
    assert dict(found.dropped) == {
        "it is too much like one that is known": 1, "it overlaps a test item": 1, "its reference solution does not run": 1,
        "its answer is empty or too long": 2, "doing nothing passes its checker": 1, "its world cannot be built": 1,
                                   "no question": 1,
        "no sql": 1, "not a JSON object": 1}
    assert sum(found.dropped.values()) + len(found.kept) == 13
    assert [item.id for item in found.kept] == [f"db-synthetic-train-{number}" for number in range(3)]


@pytest.mark.parametrize("reason, changed", [
    ("its world cannot be built", {"columns": [["ship", "TEXT"], ["Ship", "TEXT"]]}),
    ("its world cannot be built", {"columns": [["ship", "TEXT DEFAULT (zeroblob(999999999))"], ["berth", "TEXT"]]}),
    ("its world cannot be built", {"columns": [["ship", "TEXT); DROP TABLE x; --"], ["berth", "TEXT"]]}),
    ("its world cannot be built", {"columns": [["ship", "TEXT"], ["berth", 5]]}),
    ("its world cannot be built", {"columns": [["", "TEXT"], ["berth", "TEXT"]]}),
    ("its world cannot be built", {"columns": [[f"c{n}", "TEXT"] for n in range(40)], "rows": [["x"] * 40]}),
    ("its world cannot be built", {"name": "sqlite_ships"}), ("its world cannot be built", {"name": ""}),
    ("its world cannot be built", {"rows": [[{"a": 1}, "4"]]}), ("its world cannot be built", {"rows": []}),
    ("it is no valid text", {"rows": [["\ud800", "4"]]}), ("it is too long", {"rows": [["x" * 30_000, "4"]]}),
    ("its reference solution does not run", {"sql": "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x FROM c) SELECT COUNT(*) FROM c"}),
    ("its reference solution does not run", {"sql": "SELECT '" + "a" * 40 + "!' REGEXP '^(a+)+$'"}),
    ("its reference solution does not run", {"sql": "ATTACH '/tmp/x' AS y"}),
    ("its answer is empty or too long", {"sql": "-- nothing"}),
    ("the data do not determine its answer", {"sql": "DELETE FROM ships LIMIT 1"}),
    ("the data do not determine its answer", {"sql": "SELECT ship FROM ships LIMIT 1"})])
def test_hostile_tables_and_statements_are_dropped(reason, changed):
    """None of them ends the command, whatever it does to a database."""
    changed = dict(changed)
    sql = changed.pop("sql", "SELECT berth FROM ships WHERE berth = '4'")
    good = db("Where does the Heron lie?", "SELECT berth FROM ships WHERE ship = 'Heron'")
    found = judged("db", [[db("What on earth is this?", sql, TABLE | changed), good]], size="micro")
    assert dict(found.dropped) == {reason: 1} and [item.data["label"] for item in found.kept] == [["4"]]


@needs_sandbox
@pytest.mark.parametrize("reason, init, solution", [
    ("its world cannot be built", "x=a; while :; do x=$x$x; done", "echo 1"),
    ("its world leaves processes running", "b() { b | b & }; b", "echo 1"), ("its world leaves processes running", "sleep 60 &", "echo 1"),
    ("its world cannot be built", "seq 60000 | (cd /tmp && xargs touch)", "echo 1"), ("its world cannot be built", "exit 3", "echo 1"),
    ("its world cannot be built", "echo '" + "x" * 19_000 + "' > /nowhere/x", "echo 1"), ("it is too long", "#" * 30_000, "echo 1"),
    ("it is no valid text", "echo '\ud800'", "echo 1"), ("its answer is no plain text", "true", "printf 'a\\0b'"),
    ("its answer is no plain text", "true", "printf '\\xf0\\x28'"), ("its reference solution does not run", "true", "yes")])
def test_hostile_worlds_and_solutions_are_dropped(reason, init, solution):
    good = shell("Which colour does the keel have?", "echo green > /opt/keel", "cat /opt/keel")
    found = judged("os", [[shell("What on earth is this?", init, solution), good]], size="micro")
    assert dict(found.dropped) == {reason: 1} and [item.data["answer"]["value"] for item in found.kept] == ["green"]


@needs_sandbox
def test_a_world_that_can_be_built_only_sometimes_is_dropped(monkeypatch):
    """It was built twice when its solution was tried, and cannot be when it is played."""
    opened = []
    original = OSEnv._open

    def open_twice(self, data):
        opened.append(data)
        return original(self, data | {"init": "exit 3"} if len(opened) > 2 else data)

    monkeypatch.setattr(OSEnv, "_open", open_twice)
    found = judged("os", [[shell("Which colour does the keel have?", "echo green > /opt/keel", "cat /opt/keel")]], size="micro")
    assert dict(found.dropped) == {"its world cannot be built": 1} and not found.kept and len(opened) == 3


@pytest.mark.parametrize("task", ["db", "kg", pytest.param("os", marks=needs_sandbox)])
def test_other_words_for_a_known_problem_are_no_new_problem(task):
    """Its world and solution are those of a test item, or of a train item."""
    proposals = []
    for split, words in (("test", "Zephyr quartz unto whom jubilant"), ("train", "Grumbling vexed omnibus pyxes")):
        with envs.make(task, size="small", split=split) as env:
            shown = next(item.data for item in env.instances if (
                "answer" in item.data if task == "os" else task == "kg" or not item.data["changes"] and len(item.data["tables"]) == 1))
        proposals.append(as_example(task, shown) | {"question": words})
    found = judged(task, [proposals])
    assert not found.kept
    assert dict(found.dropped) == {"it overlaps a test item": 1, "it is too much like one that is known": 1}


@needs_sandbox
def test_shells_keep_what_proves_itself():
    found = judged("os", [[
        shell("How tall is the third mast in /root/masts?", "printf '3\\n5\\n8\\n' > /root/masts", "sed -n 3p /root/masts"),
        shell("Which colour does the keel have?", "echo green > /opt/keel", "cat /opt/keel"),
        shell("What did the dice show?", "true", "echo $RANDOM$RANDOM"), shell("Is there a crow's nest aboard?", "exit 3",
                                                                               "echo 1"),
        shell("How deep is the hold of this brig?", "true", "cat /nowhere"), shell("Say nothing whatsoever.", "true", "true"),
        shell("Print the whole manual of seamanship.", "true", "seq 1000"), shell("Wait for the tide.", "true", "sleep 60"),
        {"question": "No scripts?", "init": 3}]])
    assert [item.data["answer"] for item in found.kept] == [{"kind": "integer", "value": "8"}, {"kind": "string",
                                                                                                "value": "green"}]
    assert dict(found.dropped) == {
        "its reference solution gives different answers": 1, "its world cannot be built": 1,
                                   "its reference solution does not run": 2,
        "its answer is empty or too long": 2, "no init": 1}


def test_graphs_keep_what_proves_itself():
    item = envs.make("kg", size="small", split="train").instances[0].data
    hop = next(action for action in item["actions"] if action.startswith("get_neighbors("))
    entity, relation = (part.strip() for part in hop.removeprefix("get_neighbors(").rstrip(")").split(","))
    name = next(name for name, known in item["entities"].items() if known == entity)
    actions = [f"get_relations({entity})", f"get_neighbors({entity},{relation})"]
    right = {"question": "Tell me everything that follows, please and thank you.", "entities": {name: entity},
             "actions": actions}
    found = judged("kg", [[
        right, right | {"question": "Another one?", "entities": {"Nowhere Land": entity}},
        right | {"question": "Broken calls?", "actions": ["get_neighbors(x"]}, right | {"question": "None?", "actions": []},
        right | {"question": "Hidden entity within?", "entities": {}}]])
    assert len(found.kept) == 1 and found.kept[0].data["answer"]
    assert dict(found.dropped) == {"it names entities that are not in the graph": 2, "its reference solution does not run": 2}


class Scripted(BaseHTTPRequestHandler):
    """Chat completions from a list."""

    answers: list = []
    asked: list = []

    def do_GET(self):
        self.reply({"data": [{"id": "scripted-1"}]})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append(body)
        act = self.answers.pop(0) if self.answers else 503
        if isinstance(act, int):
            self.send_error(act)
        elif act in ("endless", "trickle"):
            self.send_response(200)
            self.end_headers()
            try:
                while True:
                    self.wfile.write(b" " * (1 << 16 if act == "endless" else 1))
                    time.sleep(0 if act == "endless" else 0.02)
            except OSError:                                  # the other side has had enough
                pass
        else:
            self.reply(act if isinstance(act, list) else {"choices": [{"message": {"role": "assistant", "content": act}}]})

    def reply(self, body):
        data = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *arguments):
        pass


@pytest.fixture
def endpoint(monkeypatch):
    monkeypatch.setattr(synthesise, "RETRY_S", (0.01, 0.01))
    server = ThreadingHTTPServer(("127.0.0.1", 0), Scripted)
    Scripted.asked, Scripted.answers = [], []
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()
    server.server_close()


def test_the_command_writes_instances_that_load_and_a_report(endpoint, tmp_path, capsys):
    (tmp_path / "avoid.json").write_text(json.dumps([{"description": "List the forbidden harbour dues"}]))
    Scripted.answers[:] = [
        json.dumps(db("Where does the Heron lie?", "SELECT berth FROM ships WHERE ship = 'Heron'")) + "\nnot json",
        json.dumps([db("List the forbidden harbour dues", "SELECT berth FROM ships"),
                    db("What number has the pier of Osprey got?", "SELECT berth FROM ships WHERE ship = 'Osprey'")])]
    arguments = ["--task", "db", "--endpoint", endpoint, "--count", "2", "--out", str(tmp_path / "new"),
                 "--avoid", str(tmp_path / "avoid.json")]
    assert synthesise.main(arguments) == 0
    kept = load_instances(tmp_path / "new")
    assert [item.data["label"] for item in kept] == [["4"], ["7"]]
    report = json.loads((tmp_path / "new.json").read_text())
    assert report == {"task": "db", "requests": 2, "kept": 2, "dropped": {"it overlaps a test item": 1, "not a JSON object": 1}}
    assert Scripted.asked[0]["model"] == "scripted-1"
    assert "Where does the Heron lie?" in Scripted.asked[1]["messages"][1]["content"]
    with pytest.raises(ValueError, match="exists; name a new folder"):
        synthesise.main(arguments)
    env = envs.make("db", size="micro", split="train", extra=str(tmp_path / "new"))
    plain = len(envs.make("db", size="micro", split="train").instances)
    assert list(env.instances[plain:]) == kept
    config = load_recipe("micro", tasks=["db"], **{"env.extra": {"db": str(tmp_path / "new")}})
    assert list(make_env(config, "db", "train", extra=True).instances[plain:]) == kept
    assert len(make_env(config, "db", "train").instances) == plain      # the warm start's, whose cache it therefore shares
    other = load_recipe("micro", tasks=["db"])
    assert cache_key(config) == cache_key(other) and config.identity() != other.identity()
    with pytest.raises(ValueError, match="task in env.extra: .*'dbs'"):
        load_recipe("micro", **{"env.extra": {"dbs": "x"}})
    with pytest.raises(EnvFault, match="os: .* holds instances of db"):
        envs.make("os", size="micro", extra=str(tmp_path / "new"))
    with pytest.raises(EnvFault, match="is no folder that"):
        envs.make("db", size="micro", extra=str(tmp_path / "nothing"))


HERON = json.dumps(db("Where does the Heron lie?", "SELECT berth FROM ships WHERE ship = 'Heron'"))
OSPREY = json.dumps(db("What number has the pier of Osprey got?", "SELECT berth FROM ships WHERE ship = 'Osprey'"))
GANNET = json.dumps(db("Gannet: name its mooring, quickly!", "SELECT berth FROM ships WHERE ship = 'Gannet'"))


def labels(folder):
    return [item.data["label"] for item in load_instances(folder)]


def test_a_failing_endpoint_ends_the_command_and_the_same_command_goes_on(endpoint, tmp_path, capsys):
    arguments = ["--task", "db", "--endpoint", endpoint, "--count", "2", "--out", str(tmp_path / "new")]
    Scripted.answers[:] = [HERON + "\nprose", 503, 503, 503]
    with pytest.raises(EnvFault, match="chat/completions failed: .*503"):
        synthesise.main(arguments)
    assert labels(tmp_path / "new") == [["4"]]               # what was kept is written all the same
    notes = tmp_path / "new.progress.jsonl"
    with notes.open("a") as file:
        file.write('{"kept": [{"quest')                      # what a killed process may leave
    Scripted.answers[:] = [503, HERON, OSPREY + "\n" + GANNET]
    assert synthesise.main(arguments) == 0                   # one failure alone is waited out
    assert "going on after 1 requests" in capsys.readouterr().out
    assert labels(tmp_path / "new") == [["4"], ["7"]] and not notes.exists()
    assert json.loads((tmp_path / "new.json").read_text()) == {"task": "db", "requests": 3, "kept": 2, "dropped": {
        "it is more than was asked for": 1, "it is too much like one that is known": 1, "not a JSON object": 1}}
    Scripted.answers[:] = []
    with pytest.raises(ValueError, match="exists; name a new folder"):
        synthesise.main(arguments)


def test_notes_of_other_settings_are_not_gone_on_with(endpoint, tmp_path):
    arguments = ["--task", "db", "--endpoint", endpoint, "--count", "2", "--max-requests", "1", "--out", str(tmp_path / "new")]
    Scripted.answers[:] = [HERON]
    assert synthesise.main(arguments) == 1 and labels(tmp_path / "new") == [["4"]]
    with pytest.raises(ValueError, match="is of another command"):
        synthesise.main([*arguments, "--seed", "7"])
    assert labels(tmp_path / "new") == [["4"]]


def test_answers_that_do_not_end_are_counted(endpoint, tmp_path, monkeypatch):
    monkeypatch.setattr(synthesise, "MAX_ANSWER_BYTES", 1 << 18)
    Scripted.answers[:] = ["endless", "trickle", HERON]
    begin = time.monotonic()
    assert synthesise.main(["--task", "db", "--endpoint", endpoint, "--count", "1", "--timeout", "1.5", "--out",
                            str(tmp_path / "new")]) == 0
    assert time.monotonic() - begin < 60
    assert json.loads((tmp_path / "new.json").read_text())["dropped"] == {
        "the endpoint gave no whole answer in time": 1, "the endpoint's answer does not end": 1}


@pytest.mark.parametrize("answers, words", [
    ([[1, 2]], r"no chat completion: \[1, 2\]"), ([["x"] * 3], "no chat completion"), ([401], "failed: .*401"),
    ([404, HERON], "failed: .*404")])
def test_what_is_no_answer_is_a_fault_in_one_line(endpoint, tmp_path, answers, words):
    Scripted.answers[:] = answers
    with pytest.raises(EnvFault, match=words) as caught:
        synthesise.main(["--task", "db", "--endpoint", endpoint, "--count", "1", "--out", str(tmp_path / "new")])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("change", [{"--count": "0"}, {"--per-request": "-1"}, {"--timeout": "nan"}, {"--avoid": "/nowhere"}])
def test_settings_are_checked_before_the_endpoint_is_asked(endpoint, tmp_path, capsys, change):
    settings = {"--task": "db", "--endpoint": endpoint, "--out": str(tmp_path / "new")} | change
    assert envs_main(["synthesise", *(word for pair in settings.items() for word in pair)]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1 and not Scripted.asked


def test_no_endpoint_there_is_a_fault(endpoint, tmp_path):
    with pytest.raises(EnvFault, match="failed: .*refused"):
        synthesise.main(["--task", "db", "--endpoint", "http://127.0.0.1:9/v1", "--out", str(tmp_path / "other")])


@pytest.mark.extended
def test_a_killed_command_loses_one_answer_at_most(endpoint, tmp_path):
    command = [sys.executable, "-m", "envs", "synthesise", "--task", "db", "--endpoint", endpoint, "--count", "3", "--out",
               str(tmp_path / "new")]
    Scripted.answers[:] = [HERON, OSPREY, "trickle"]
    process = subprocess.Popen(command, cwd=Path(__file__).resolve().parents[1], stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while len(Scripted.asked) < 3 and time.monotonic() < deadline:
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "new").exists()
    Scripted.answers[:] = [GANNET]
    assert synthesise.main(command[4:]) == 0
    assert labels(tmp_path / "new") == [["4"], ["7"], ["9"]]
    assert Scripted.asked[2] == Scripted.asked[3]            # it asks what it would have asked
