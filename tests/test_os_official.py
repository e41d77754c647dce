"""AgentBench's OS records: what is read, how chains are judged under both rules, and that reference solutions pass."""

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from envs.base import EnvFault, Status, assistant_call
from envs.check import check_env
from envs.os_env import OSEnv, sandbox

OK, REASON = sandbox.probe()
pytestmark = pytest.mark.skipif(not OK, reason=f"no sandbox here: {REASON}")
COMPARE = {"language": "python", "file": "check/integer-match.py"}
# what cannot be solved here or anywhere, and why; everything else must pass
UNSOLVED = {"os-official-train-242": "its reference prints an empty line where a number is compared",
            "os-official-train-252": "its reference prints two numbers where one is compared",
            "os-official-train-356": "its set-up sleeps for 60 s; a script may take 30 s",
            "os-official-dev-24": "needs a second user (chown, su)"}
SKIPPED = {"os-official-dev-3": "example/0.sh", "os-official-dev-5": "example/0.sh", "os-official-dev-25": "init/stock-log.sh"}


def record(description="How many?", init=None, evaluation=None, **more):
    return {"description": description, "create": {"init": init} if init else {}, "evaluation": evaluation or {"match": "1"},
            **more}


@pytest.fixture
def make(tmp_path):
    made = []

    def environment(*records, files=None, split="train", rules="strict"):
        folder = tmp_path / f"set-{len(made)}"
        for name, text in (files or {}).items():
            (folder / "os" / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / "os" / name).write_text(text)
        if records:
            (folder / "os").mkdir(parents=True, exist_ok=True)
            (folder / "os" / "train.json").write_text(json.dumps(records))
        made.append(OSEnv(source="official", split=split, path=str(folder), rules=rules))
        return made[-1]

    yield environment
    for env in made:
        env.close()


def bash(script):
    return assistant_call("bash_action", script=script)


def answer(text):
    return assistant_call("answer_action", answer=str(text))


def last(env, *turns):
    env.reset(0)
    for turn in turns:
        result = env.step(turn)
    return result


# ---- reading --------------------------------------------------------------------------------------------------------------
def test_a_missing_folder_or_file_says_what_belongs_there(tmp_path, monkeypatch):
    monkeypatch.delenv("EPPO_DATA", raising=False)
    with pytest.raises(ValueError, match="pass path= or set EPPO_DATA"):
        OSEnv(source="official", split="train")
    with pytest.raises(ValueError, match="train.json does not exist; it belongs to data/os_interaction"):
        OSEnv(source="official", split="train", path=str(tmp_path))


@pytest.mark.parametrize("bad, reason", [
    ({"description": " "}, "no description"), ([], "no description"), ({"description": "x"}, "no evaluation"),
    (record(evaluation={"example": "ls"}), "neither match nor check"),
    (record(evaluation={"check": [None, COMPARE]}), "there is none"),
    (record(evaluation={"check": {"file": "check/0.sh"}}), "its script check/0.sh is not in scripts"),
    (record(evaluation={"check": {"file": "../../train.json"}}), "is not in scripts"),
    (record(evaluation={"check": {"code": "x", "language": "perl"}}), "unknown language 'perl'"),
    (record(init={"nothing": 1}), "not a script"), (record(start=["x"]), "start is not a script")])
def test_records_that_cannot_be_used_are_listed_with_the_reason(make, bad, reason):
    env = make(record(), bad, record())
    assert [item.id for item in env.instances] == ["os-official-train-0", "os-official-train-2"]
    (name, said), = env.skipped
    assert name == "os-official-train-1" and reason in said


def test_a_copy_of_the_public_folder_is_read_in_numeric_order(make):
    files = {f"data/{folder}/{number}.json": json.dumps(record(f"q{folder}-{number}")) for folder in (1, 2) for number in (2,
                                                                                                                           10)}
    files |= {"data/7/0.json": json.dumps([record("by script", evaluation={"check": {"file": "check/0.sh"}})]),
              "scripts/7/check/0.sh": "[ \"$1\" = yes ]"}
    env = make(files=files, split="test")
    assert [item.data["question"] for item in env.instances] == ["q1-2", "q1-10", "q2-2", "q2-10", "by script"]
    env.reset(4)
    assert env.step(answer("yes")).reward == 1.0
    env.reset(4)
    assert env.step(answer("no")).reward == 0.0


def test_set_up_scripts_of_every_form_run_in_order(make):
    env = make(record(init=["echo 1 > a", {"code": "print(2, file=open('b', 'w'))", "language": "python"},
                            {"code": "cat a b > c"}],
                      start="sleep 77 & cd /opt", evaluation={"match": {"regex": "^[0-9]+$", "strip": True}}))
    env.reset(0)
    seen = env.step(bash("tr '\\n' ' ' < /root/c; pwd; grep -l sleep /proc/[0-9]*/comm | wc -l")).messages[0]["content"]
    assert seen.endswith("1 2 /opt\n2")                                       # its own and the sandbox's first process
    assert env.step(answer(" 12\n")).reward == 1.0
    with pytest.raises(EnvFault, match="ended with exit 3: oh"):
        last(make(record(init="echo oh; exit 3")))


# ---- judging ----------------------------------------------------------------------------------------------------------------
def test_strict_asks_for_the_reference_before_the_agent_and_agentbench_after(make):
    counted = record(init="touch a b c", evaluation={"check": [None, COMPARE], "example": "ls | wc -l"})
    spoil, right, spoilt = bash("rm *"), answer(3), answer(0)
    assert last(make(counted), right).reward == 1.0
    assert last(make(counted), spoil, right).reward == 1.0
    assert last(make(counted), spoil, spoilt).reward == 0.0
    assert last(make(counted, rules="agentbench"), spoil, right).reward == 0.0
    assert last(make(counted, rules="agentbench"), spoil, spoilt).reward == 1.0


def test_chains_hand_the_answer_and_all_outputs_on(make):
    chain = record(evaluation={"example": "echo ref", "check": [
        None, {"code": "echo second; [ \"$1,$2\" = \"it,ref\n\" ]"},
        {"code": "import sys; sys.exit(sys.argv[1:] != ['it', 'ref\\n', 'second\\n'])", "language": "python"}]})
    for rules in ("strict", "agentbench"):
        assert last(make(chain, rules=rules), answer("it")).reward == 1.0
        assert last(make(chain, rules=rules), answer("its")).reward == 0.0


@pytest.mark.parametrize("rules", ["strict", "agentbench"])
@pytest.mark.parametrize("text", ["x" * 99_000, "\U0001f600" * 99_000, "\0\n\x1b[2J", "-n", "$(echo ref)", "it\n"])
def test_no_answer_is_a_fault_of_the_machine(make, text, rules):
    """Four hundred thousand bytes do not fit into a command line; that makes the answer wrong, not the sandbox broken."""
    chain = record(evaluation={"example": "echo ref", "check": [None, {"code": "[ \"$1\" = it ]"}]})
    result = last(make(chain, rules=rules), answer(text))
    assert (result.status, result.reward) == (Status.COMPLETED, 0.0)


def test_state_checks_run_over_what_was_left_and_cannot_be_prepared(make):
    state = record(evaluation={"check": [{"code": "[ \"$(cat /root/done)\" = yes ]"}], "example": "echo yes > /root/done"})
    finish = assistant_call("finish_action", thought="done")
    for rules in ("strict", "agentbench"):
        assert last(make(state, rules=rules), bash("echo yes > /root/done"), finish).reward == 1.0
        assert last(make(state, rules=rules), bash("true"), finish).reward == 0.0
        hijack = "mkdir -p /usr/local/bin; printf '#!/bin/sh\\necho yes\\n' > /usr/local/bin/cat; chmod +x /usr/local/bin/*; " \
                 "echo 'cat() { echo yes; }' >> /root/.bashrc; export BASH_ENV=/root/.bashrc"
        assert last(make(state, rules=rules), bash(hijack), finish).reward == 0.0
    race = "nohup bash -c 'while :; do echo no > done; echo yes > done; done' >/dev/null 2>&1 & sleep 0.1; echo no > done"
    result = last(make(state), bash(race), finish)
    assert result.status == Status.COMPLETED and result.info["sandbox"] == "bubblewrap"


def test_full_disks_and_sparse_files_are_copied_and_what_cannot_be_is_the_agents_loss(make):
    env, finish = make(record(evaluation={"check": [{"code": "test -s /root/s1"}]})), assistant_call("finish_action",
                                                                                                     thought="x")
    fill = bash("for i in $(seq 40); do head -c 60M /dev/zero > s$i || break; done")
    assert last(env, fill, finish).reward == 1.0
    assert last(env, bash("for i in $(seq 200); do truncate -s 60M /root/s$i; done"), finish).reward == 1.0
    env.reset(0)
    env.step(fill)
    env._sandbox.limits = replace(env._sandbox.limits, disk_bytes=1 << 20)    # too little room for the copy
    result = env.step(finish)
    assert (result.reward, result.status) == (0.0, Status.COMPLETED) and "cannot be copied" in result.info["error"]


def test_the_world_is_that_of_a_root_user(make):
    env = make(record(init="echo secret > locked; chmod 000 locked; echo x > /usr/new.log; mkdir /top; useradd -m -s /bin/bash "
                           "mia"))
    env.reset(0)
    script = "cat locked; id -un; cat /usr/new.log; ls -d /top; getent passwd mia | cut -d: -f7; grep -c . /etc/group; ls -A ~"
    assert env.step(bash(script)).messages[0]["content"].split("\n\n")[1].split() == [
        "secret", "root", "x", "/top", "/bin/bash", "28", ".bashrc", ".profile", "locked"]
    assert "Read-only" in env.step(bash("touch /usr/bin/new")).messages[0]["content"]


# ---- the public sets ------------------------------------------------------------------------------------------------------
def solve(env, index):
    try:
        env.reset(index)
        while not (result := env.step(env.expert())).done:
            pass
        return env.instances[index].id, result.reward, result.info.get("error", "")
    except EnvFault as fault:
        return env.instances[index].id, None, str(fault)


def solve_all(split, rules, step):
    environments = [OSEnv(source="official", split=split, rules=rules) for _ in range(2)]
    indices = range(0, len(environments[0].instances), step)
    with ThreadPoolExecutor(2) as pool:
        parts = pool.map(lambda number: [solve(environments[number], index) for index in indices[number::2]], range(2))
        found = {name: (reward, error) for part in parts for name, reward, error in part}
    for env in environments:
        env.close()
    return found, environments[0].skipped


@pytest.fixture
def data(eppo_data, monkeypatch):
    monkeypatch.setenv("EPPO_DATA", str(eppo_data("os").parent))


def test_dev_references_pass(data):
    found, skipped = solve_all("dev", "strict", 1)
    assert {name: said.split()[2] for name, said in skipped} == SKIPPED
    assert {name for name, (reward, _) in found.items() if reward != 1.0} == {"os-official-dev-24"}
    assert len(found) == 23


def test_a_sample_of_train_references_passes(data):
    found, skipped = solve_all("train", "strict", 40)
    assert len(found) == 25 and not skipped
    assert [name for name, (reward, _) in found.items() if reward != 1.0 and name not in UNSOLVED] == []


@pytest.mark.extended
@pytest.mark.parametrize("rules", ["strict", "agentbench"])
def test_all_train_references_pass_but_those_listed(data, rules):
    found, skipped = solve_all("train", rules, 1)
    failed = {name for name, (reward, _) in found.items() if reward != 1.0}
    assert len(found) == 1000 and not skipped
    if rules == "strict":
        assert failed == {name for name in UNSOLVED if "train" in name}, failed
    assert len(failed) <= 50


@pytest.mark.extended
def test_the_contract_holds_on_public_records(data):
    rows = check_env("os", source="official", splits=("train",), sample=8)
    assert {row["kind"] for row in rows} == {"integer", "string", "size"}
