"""WebShop's episodes, and what its catalogues and instances depend on."""

from __future__ import annotations

import collections
import gc
import os
import random
import re
import subprocess
import sys
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from models import tiny_tokenizer

import envs
from envs.base import Status, assistant_call
from envs.check import check_env
from envs.instances import fingerprint, load_instances, save_instances
from envs.tool_calls import render_turn
from envs.webshop_env import catalogue as products
from envs.webshop_env.goals import KINDS
from eppo.chat import ChatFormat
from eppo.generate import ScriptedGenerator
from eval.agentbench import evaluate

ROOT = Path(__file__).parent.parent


def click(value: str) -> dict[str, object]:
    return assistant_call("click_action", value=value)


def search(keywords: str) -> dict[str, object]:
    return assistant_call("search_action", keywords=keywords)


# ---- episodes -----------------------------------------------------------------------------------------------------------
def test_check_env_passes() -> None:
    rows = check_env("webshop", sample=5, sizes=("micro",)) + check_env("webshop", sample=5, sizes=("small",), splits=("dev",))
    assert {row["kind"] for row in rows} == set(KINDS)
    micro = [row for row in rows if row["size"] == "micro"]
    assert max(row["max_turns"] for row in micro) <= 6 and max(row["max_chars"] for row in micro) <= 700
    check_env("webshop", sample=5, rules="agentbench", sizes=("micro",))


def test_micro_episode_text_by_text() -> None:
    env = envs.make("webshop", split="train")
    index = next(number for number, instance in enumerate(env.instances) if instance.kind == "second page"
                 and len(instance.data["goal"]["goal_options"]) == 1)
    goal = env.instances[index].data["goal"]
    system, user = env.reset(index)
    assert len(system["content"].split()) <= 12
    (value,) = goal["goal_options"].values()
    assert user["content"] == f"buy {goal['keywords']} {value} under {goal['price_upper']:.0f}"
    first = env.step(env.expert()).messages[0]["content"]
    lines = first.split(", ")
    assert lines[3:] == ["next >"] and all(f" {goal['keywords']} $" in line for line in lines[:3])
    assert all(int(line.split("$")[1]) > goal["price_upper"] for line in lines[:3])
    second = env.step(env.expert()).messages[0]["content"]
    assert f"{goal['asin']} {goal['keywords']} $" in second and "< prev" in second
    assert env.step(env.expert()).messages[0]["content"].endswith("buy now")
    assert value not in env.step(env.expert()).messages[0]["content"]
    result = env.step(env.expert())
    assert (result.reward, result.status, result.messages) == (1.0, Status.COMPLETED, [])
    assert result.info["asin"] == goal["asin"] and result.info["turns"] == 5 and result.info["cut_chars"] == 0


@pytest.mark.extended
def test_check_env_passes_at_full_size() -> None:
    rows = check_env("webshop", sample=40, sizes=("full",))
    assert {row["kind"] for row in rows} == set(KINDS) and all(row["mean_turns"] <= 6 for row in rows)
    check_env("webshop", sample=20, sizes=("full",), splits=("dev",), rules="agentbench")


@pytest.mark.parametrize("size", ("micro", "small", pytest.param("full", marks=pytest.mark.extended)))
def test_kinds_are_what_they_say(size: str) -> None:
    env = envs.make("webshop", size=size, split="dev")
    turns = collections.defaultdict(list)
    for index, instance in enumerate(env.instances):
        turns[instance.kind].append(len(env.oracle(index)))
        goal, hits = instance.data["goal"], env.catalogue.search(instance.data["goal"]["keywords"], env.layout.max_hits)
        page = hits.index(env.catalogue.find(goal["asin"])) // env.layout.per_page
        assert page == (instance.kind == "second page")
        if instance.kind == "cheaper":
            assert env.catalogue.products[hits[0]].price > goal["price_upper"]
    assert set(turns["no option"]) == {3} and set(turns["one option"]) == {4} and set(turns["two options"]) == {5}
    most = 1 if size == "micro" else 2                       # options of a goal of the other kinds
    assert {4, 5} <= set(turns["second page"]) <= set(range(4, 5 + most)) and {3, 4} <= set(turns["cheaper"]) <= set(range(3, 4 + most))


def test_unknown_button_is_answered_with_the_clickables_and_never_buying_gives_nothing() -> None:
    env = envs.make("webshop", size="small", split="dev")
    env.reset(0)
    env.step(env.expert())
    env.step(env.expert())
    before = env.session.text()
    result = env.step(click("Add to Cart"))
    text = result.messages[0]["content"]
    assert text == f"Invalid action: 'add to cart' cannot be clicked here. Clickables: {', '.join(env.session.clickables)}"
    assert result.info["invalid_calls"] == 1 and env.session.text() == before
    assert "no search bar here" in env.step(search("mug")).messages[0]["content"]
    while not result.done:
        result = env.step(click("Add to Cart"))
    assert (result.reward, result.status, result.truncated) == (0.0, Status.TASK_LIMIT, True)


def test_buttons_are_read_in_any_case_and_spacing() -> None:
    env = envs.make("webshop", split="dev")
    env.reset(0)
    env.step(env.expert())
    assert env.step(click("  NEXT   > ")).info["invalid_calls"] == 0 and env.session.number == 2


@pytest.mark.parametrize("rules", ("strict", "agentbench"))
def test_a_million_characters_are_read_in_no_time_and_not_repeated_for_ever(rules: str) -> None:
    env = envs.make("webshop", size="small", split="dev", rules=rules)
    for text in ("x" * 1_000_000, "find me " * 125_000, "1." * 500_000, "a'" * 500_000, "[" * 1_000_000, "\u00e9 " * 500_000):
        for turn in (search(text), click(text)):
            env.reset(0)
            start = time.process_time()
            result = env.step(turn)
            assert time.process_time() - start < 2 and not result.done
            told = len(result.messages[0]["content"])
            if rules == "strict":                            # agentbench repeats the action as upstream does
                assert told < 20_000 and (turn != search(text) or result.info["cut_chars"] > 900_000)


def test_wrong_purchases_pay_less_than_one() -> None:
    env = envs.make("webshop", split="dev")
    for index, instance in enumerate(env.instances):
        if instance.kind not in ("cheaper", "second page"):
            continue
        env.reset(index)
        env.step(env.expert())
        env.step(click(env.catalogue.products[env.session.listed[0]].asin))
        result = env.step(click("buy now"))
        assert result.status == Status.COMPLETED and 0.0 < result.reward < 1.0 and result.info["price_met"] is False


def test_agentbench_messages_are_literal() -> None:
    env = envs.make("webshop", size="small", split="dev", rules="agentbench")
    start = env.reset(0)[1]["content"]
    instruction = env.goal["instruction_text"]
    actions = "\n\nAvailable Actions:\n{'has_search_bar': True, 'clickables': ['search']}"
    assert start == f"The initial observation:\nWebShop [SEP] Instruction: [SEP] {instruction} [SEP] Search{actions}"
    silent = f"Observation:\nNo executable tool calls found! You should call a tool instead.{actions}"
    assert env.step("hm").messages == [{"role": "user", "content": silent}]
    unknown = env.step(assistant_call("buy", what="x")).messages[0]
    assert unknown == {"role": "user", "content": silent}
    broken = env.step('<tool_call>{"name": "click_action", "arguments": "x"}</tool_call>').messages[0]
    assert broken["role"] == "user" and broken["content"].startswith("No valid tool call found from agent.\nObservation:\n")
    same = env.step(click("nowhere")).messages[0]
    home = f"WebShop [SEP] Instruction: [SEP] {instruction} [SEP] Search{actions}"
    assert same["role"] == "tool" and same["content"] == f"Action: click[nowhere]\n\nObservation:\n{home}"
    wrong_key = env.step(assistant_call("search_action", query=env.goal["query"])).messages[0]
    assert wrong_key["content"].startswith(f"Action: search[{env.goal['query']}]\n\nObservation:\nInstruction:")
    page = env.session.text()
    for keywords in ("a [b]", "a\nb", ""):
        env.step(search(keywords))
        assert env.session.text() == page
    while (result := env.step(click("nowhere"))).messages[0]["content"] != "Task limit reached.":
        assert not result.done
    assert result.status == Status.TASK_LIMIT and result.info["turns"] == 20 and result.messages[0]["role"] == "tool"


def test_site_crash_is_a_task_error_under_agentbench() -> None:
    env = envs.make("webshop", split="dev", rules="agentbench")
    env.reset(0)
    result = env.step(search("<a> cotton"))
    assert (result.status, result.reward, result.done) == (Status.TASK_ERROR, 0.0, True)


def test_what_is_drawn_in_an_episode_depends_on_its_seed_alone() -> None:
    """agentbench's hidden command <r> lists random products."""
    env, told = envs.make("webshop", size="small", split="dev", rules="agentbench"), {}
    for seed in (0, 1, 0, 1):
        random.seed(len(told))
        env.reset(3, seed=seed)
        assert told.setdefault(seed, page := env.step(search("<r>")).messages[0]["content"]) == page
    assert told[0] != told[1]


def test_a_perfect_shopper_scores_one_through_the_whole_stack() -> None:
    """Environment, rollout, evaluation rows; who looks for a button that does not exist scores nothing."""
    chat = ChatFormat(tiny_tokenizer())
    for size, rules in (("micro", "strict"), ("small", "agentbench")):
        turns = envs.make("webshop", size=size, split="dev", rules=rules).oracle(0)
        scores = []
        for played in (turns, [*turns[:-1], *[click("Add to Cart")] * 20]):
            script = [chat.turn_ids(render_turn(turn)) for turn in played]
            rows = evaluate(ScriptedGenerator(script), ["webshop"], seeds=(0, 1), tokenizer=chat, size=size, split="dev",
                            rules=rules, instances=1, max_tokens=60_000, workers=1)
            scores += [(row.success, row.score, row.status) for row in rows.itertuples()]
        assert scores == [(True, 1.0, "completed")] * 2 + [(False, 0.0, "task limit reached")] * 2


def test_argument_names_matter_under_strict_rules_only() -> None:
    """agentbench reads the first argument whatever its name."""
    told = {}
    for rules in ("agentbench", "strict"):
        env = envs.make("webshop", size="small", split="dev", rules=rules)
        env.reset(0)
        told[rules] = env.step(assistant_call("search_action", query=env.goal["query"])).messages[0]["content"]
        assert env.session.page == ("results" if rules == "agentbench" else "search") and env.invalid_calls == (rules == "strict")
    assert told["agentbench"].startswith("Action: search[") and told["strict"] == "Error: search_action: missing argument 'keywords'"


def test_a_closed_environment_holds_nothing_and_needs_a_reset() -> None:
    env = envs.make("webshop", split="dev")
    opening = env.reset(0)
    visit = weakref.ref(env.session)
    env.close()
    env.close()
    gc.collect()
    assert visit() is None
    with pytest.raises(RuntimeError, match="call reset"):
        env.step(search("cup"))
    assert env.reset(0) == opening


@pytest.mark.parametrize("rules", ("strict", "agentbench"))
def test_random_clicks_rarely_win(rules: str) -> None:
    rng, env, rewards = random.Random(0), envs.make("webshop", split="dev", rules=rules), []
    for _ in range(250):
        env.reset(rng.randrange(len(env.instances)))
        result = env.step(search(env.goal["query"]))
        while not result.done:
            result = env.step(click(rng.choice(env.session.clickables or ["search"])))
        rewards.append(result.reward)
    assert sum(reward == 1.0 for reward in rewards) / len(rewards) < 0.25


# ---- what the catalogues and instances depend on ------------------------------------------------------------------------
def test_catalogues_do_not_depend_on_the_hash_seed() -> None:
    program = ("import envs; from envs.instances import fingerprint; env = envs.make('webshop', split='dev');"
               "hits = [env.catalogue.search(i.data['goal']['keywords'], 9) for i in env.instances];"
               "print(fingerprint([[i.data for i in env.instances], hits, [repr(p) for p in env.catalogue.products]]))")
    prints = {subprocess.run([sys.executable, "-c", program], cwd=ROOT, env=os.environ | {"PYTHONHASHSEED": seed}, check=True,
                             capture_output=True, text=True).stdout for seed in ("1", "2")}
    assert len(prints) == 1


def test_one_catalogue_serves_all_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "_shared", {})
    with ThreadPoolExecutor(8) as pool:
        catalogues = list(pool.map(lambda _: products.generated("micro"), range(16)))
    assert len({id(catalogue) for catalogue in catalogues}) == 1
    env = envs.make("webshop", split="dev")
    expected = [env.catalogue.search(instance.data["goal"]["keywords"], 9) for instance in env.instances]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda instance: env.catalogue.search(instance.data["goal"]["keywords"], 9), env.instances))
    assert found == expected


def test_micro_words_have_one_role_and_numbers_are_short() -> None:
    catalogue = products.generated("micro")
    assert 120 <= len(catalogue.products) <= 200 and len(catalogue.positions) == len(catalogue.products)
    colors = {product.title.split()[0] for product in catalogue.products}
    nouns = {product.query for product in catalogue.products}
    values = {value for product in catalogue.products for group in product.options.values() for value in group}
    assert not colors & nouns and not colors & values and not nouns & values
    assert all(10 < product.price < 100 and product.price % 5 for product in catalogue.products)
    assert all(re.fullmatch("[a-z][0-9]", product.asin) for product in catalogue.products)


def test_instances_travel_through_datasets_and_splits_share_no_instruction(tmp_path: Path) -> None:
    splits = {split: list(envs.make("webshop", split=split).instances) for split in ("train", "dev", "test")}
    save_instances(splits["dev"], tmp_path / "dev")
    assert load_instances(tmp_path / "dev") == splits["dev"]
    texts = [{instance.data["goal"]["instruction_text"] for instance in instances} for instances in splits.values()]
    assert [len(instances) for instances in splits.values()] == list(map(len, texts)) == [1000, 64, 128]
    assert not texts[0] & texts[1] and not texts[0] & texts[2] and not texts[1] & texts[2]
    assert fingerprint(splits["dev"][0].data) == fingerprint(envs.make("webshop", split="dev").instances[0].data)
