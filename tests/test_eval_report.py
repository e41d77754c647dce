"""Reports and exports: every number from rows made by hand; the paper's rows; lm-eval's, Inspect's and Hugging Face's forms."""

import json
import math
import sys

import numpy as np
import pandas as pd
import pytest
from lm_eval.utils import make_table

from eval.evaluations import Evaluation, read_evaluation
from eval.interop import inspect_logs, lm_eval_results, model_card, write_all
from eval.report import OS_SET_ENDS, difference, report
from eval.statistics import average_spread, pass_at_k
from eval.tables import paper, render

SETTINGS = {"source": "generated", "size": "micro", "rules": "strict", "split": "test", "path": None, "temperature": 0.8,
            "max_tokens": 512, "max_turn_tokens": 40, "max_turns": 20}
FIVE = ("alfworld", "db", "kg", "os", "webshop")
# wins of four instances under four seeds: success per seed 50, 75, 25, 50 %; wins per instance 4, 3, 1, 0
WINS = np.array([[1, 1, 0, 0], [1, 1, 1, 0], [1, 0, 0, 0], [1, 1, 0, 0]], dtype=bool)


def row(task, seed, index, success, **changes):
    return {"step": 3, "split": "test", "task": task, "instance": f"{task}-{index}", "index": index, "kind": ("even", "odd")[index % 2],
            "seed": seed, "eval_seed": seed, "train_seed": 7, "success": bool(success), "score": 0.25 + 0.5 * bool(success),
            "reward": float(success), "status": "completed", "turns": 2, "tokens": 100, "sampled_tokens": 20, "seconds": 0.5, "error": None,
            "rules": "strict", "temperature": 0.8, "source": "generated", "size": "micro", "turn_limit": 6, "attempt": 1} | changes


def evaluation(tmp_path, rows, settings=(), **policy):
    settings = SETTINGS | dict(settings)
    tasks = sorted({one["task"] for one in rows})
    info = {"schema": 1, "identity": "0" * 16, "policy": {"name": "me"} | policy, "settings": settings, "commit": "abc", "dirty": False,
            "turn_limits": dict.fromkeys(tasks, 6), "started": "2026-11-30T06:00:00+00:00", "continued": [], "status": "finished",
            "error": None}
    (tmp_path / "evaluation.json").write_text(json.dumps(info))
    (tmp_path / "episodes.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    return read_evaluation(tmp_path)


def grid(tasks, wins=WINS, **changes):
    return [row(task, seed, index, won, **changes) for task in tasks for seed, line in enumerate(wins) for index, won in enumerate(line)]


@pytest.fixture
def two(tmp_path):
    """db as WINS, kg its mirror, and one kg episode lost to a fault."""
    rows = grid(["db"]) + grid(["kg"], ~WINS)
    rows[-1] |= {"status": "model error", "reward": None, "success": False, "score": None, "error": "EndpointError: down"}
    return evaluation(tmp_path, rows, method="eppo", train_seed=7, step=3)


# ---- numbers --------------------------------------------------------------------------------------------------------
def test_numbers_are_those_of_the_rows(two):
    made = report(two)
    table = made.tasks.set_index("task")
    db, kg, avg = table.loc["db"], table.loc["kg"], table.loc["AVG"]
    assert db["success"] == 50 and db["std"] == pytest.approx(np.std([50, 75, 25, 50], ddof=1)) and db["score"] == 50
    assert kg["success"] == pytest.approx(np.mean([50, 25, 75, 100 / 3])) and kg["faults"] == 1     # the fault is in no score
    assert (kg["episodes"], db["episodes"], avg["episodes"], avg["faults"], avg["instances"]) == (15, 16, 31, 1, 8)
    assert avg["success"] == pytest.approx((db["success"] + kg["success"]) / 2)
    assert (db["turns"], db["tokens"], db["seconds"]) == (2, 100, 0.5)


def test_pass_at_k_is_the_unbiased_one_over_instances(two):
    table = report(two).tasks.set_index("task")
    wins = WINS.sum(axis=0)
    for k in (1, 2, 4):
        assert table.loc["db", f"pass@{k}"] == pytest.approx(100 * np.mean([pass_at_k(4, int(c), k) for c in wins]))
    assert table.loc["db", "pass@2"] == pytest.approx(100 * (1 + 1 + 0.5 + 0) / 4) and table.loc["db", "pass@4"] == 75
    assert table.loc["kg", "pass@4"] == pytest.approx(100 * (0 + 1 + 1) / 3)            # of the instances with four tries
    assert "pass@8" not in table


def test_the_average_has_both_deviations(two):
    made = report(two)
    db, kg = np.array([50, 75, 25, 50]), np.array([50, 25, 75, 100 / 3])
    assert made.average.std == pytest.approx(((db + kg) / 2).std(ddof=1)) == pytest.approx(made.tasks.set_index("task").loc["AVG", "std"])
    assert made.average.std_of_tasks == pytest.approx((db.std(ddof=1) + kg.std(ddof=1)) / 2)
    assert f"± {made.average.std_of_tasks:.1f} is the mean of the tasks' ±, as the paper prints it" in made.markdown()


def test_average_spread_from_printed_tables():
    scores_SK = np.array([[1.0, 4.0], [3.0, 4.0], [2.0, 7.0]])
    found = average_spread(scores_SK)
    assert found.mean == pytest.approx(3.5) and found.std == pytest.approx(np.std([2.5, 3.5, 4.5], ddof=1))
    assert found.std_of_tasks == pytest.approx((1 + math.sqrt(3)) / 2)
    one = average_spread(scores_SK[:1])
    assert (one.mean, one.std, one.std_of_tasks) == (2.5, None, None)                   # n/a, never 0
    missing = average_spread(np.array([[1.0, np.nan], [3.0, np.nan]]))
    assert (missing.mean, missing.std, missing.std_of_tasks) == (None, None, None)      # never a mean over fewer tasks


def test_endings_and_kinds(two):
    made = report(two)
    assert made.statuses.loc["KG"].to_dict() == {"completed": 15, "model error": 1} and made.statuses.loc["DB", "model error"] == 0
    kinds = made.kinds.set_index(["task", "kind"])
    assert kinds.loc[("DB", "even"), "success"] == pytest.approx(100 * WINS[:, ::2].mean()) and kinds.loc[("DB", "odd"), "instances"] == 2
    assert kinds.loc[("KG", "odd"), "episodes"] == 7


def test_os_sets_of_the_official_test_instances(tmp_path):
    ids = (0, 6, 7, 55, 56, 143)
    rows = [row("os", 0, number, number > 6, instance=f"os-official-test-{number}") for number in ids]
    made = report(evaluation(tmp_path, rows, {"source": "official"}))
    kinds = made.kinds[made.kinds["kind"].str.startswith("set")].set_index("kind")
    assert OS_SET_ENDS[-1] == 144 and kinds["instances"].to_dict() == {"set 1": 2, "set 2": 1, "set 6": 1, "set 7": 2}
    assert kinds.loc["set 1", "success"] == 0 and kinds.loc["set 7", "success"] == 100


def test_two_policies_are_compared_instance_by_instance(tmp_path):
    folders = [tmp_path / name for name in "abc"]
    for folder in folders:
        folder.mkdir()
    strong = evaluation(folders[0], grid(["db", "kg"]))
    weak = evaluation(folders[1], grid(["db", "kg"], WINS & (np.arange(4) != 1)))
    found = difference(strong, weak)
    assert found.mean == pytest.approx(3 / 16) and (found.n, found.wins, found.losses) == (8, 2, 0)       # instance 1: three wins of four
    assert found.low < found.mean < found.high and found == difference(strong, weak)
    with pytest.raises(ValueError, match="equal settings; these differ: temperature: 0.8 and 1.0"):
        difference(strong, evaluation(folders[2], grid(["db"]), {"temperature": 1.0}))


# ---- what is said ---------------------------------------------------------------------------------------------------
def test_what_stands_under_the_table(two):
    text = report(two).markdown()
    for words in ("generated instances (micro), split test, rules strict; temperature 0.8; turns at most DB 6, KG 6; "
                  "tokens at most 40 a turn, 512 an episode; evaluation seeds 0, 1, 2, 3",
                  "Success: solved under these rules; score: the environment's own grade", "success, %   | score, %",
                  "sample standard deviation (ddof = 1) over 4 evaluation seeds",
                  "Infrastructure faults: 1 of 32 episodes (3.12%; more than 2% fail the evaluation): 1 model error; they are in no score",
                  "This evaluation failed", "One training run", "Paper: EPPO, on AgentBench's own instances: another scale"):
        assert words in text
    assert "| 50.0 ± 20.4 " in text and "| 60.5 ± 1.1 " in text


def test_one_seed_and_temperature_zero_print_no_deviation(tmp_path):
    one = report(evaluation(tmp_path, grid(["db"], WINS[:1]))).markdown()
    assert "50.0 [15.0, 85.0]" in one and "One evaluation seed: ± over seeds is n/a" in one and "± 0.0" not in one
    greedy = evaluation(tmp_path, grid(["db"], np.repeat(WINS[:1], 4, axis=0), temperature=0.0), {"temperature": 0.0})
    made = report(greedy)
    assert "Temperature 0: seeds cannot differ by sampling" in made.markdown() and "± 0.0" not in made.markdown()
    assert made.tasks["std"].isna().all() and made.tasks["episodes"].tolist() == [4, 4] and "pass@2" not in made.tasks


def test_an_unfinished_evaluation_says_so(tmp_path):
    assert "Not every seed has played every instance yet" in report(evaluation(tmp_path, grid(["db"])[:-1])).markdown()
    assert "Not every" not in report(evaluation(tmp_path, grid(["db"]))).markdown()
    with pytest.raises(ValueError, match="holds no episode"):
        report(Evaluation(tmp_path, {}, pd.DataFrame()))


def test_tokens_and_dollars_of_an_endpoint(tmp_path):
    rows = grid(["db"], WINS[:1], attempts=3, prompt_tokens=1000, cost=0.125, served="gpt-5-2025")
    text = report(evaluation(tmp_path, rows, kind="endpoint", label="GPT-5")).markdown()
    assert "Endpoint: 4,000 prompt and 80 sampled tokens, 12 requests, 0.50 dollars; it answered as gpt-5-2025. A seed" in text
    assert "paper: GPT-5" in text and "Paper: GPT-5" in text
    rows[0]["cost"] = None
    text = report(evaluation(tmp_path, rows, kind="endpoint", body={"temperature": None})).markdown()
    assert "n/a dollars" in text and "Request fields set by hand: {'temperature': None}" in text


def test_files_say_what_the_rows_say_and_repeat(two, tmp_path):
    made = report(two, tmp_path / "a")
    report(two, tmp_path / "b")
    names = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert names == ["report.csv", "report.json", "report.md", "report.tex", "report_kinds.csv", "report_statuses.csv"]
    assert all((tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes() for name in names)
    table = pd.read_csv(tmp_path / "a" / "report.csv").set_index("task")
    assert table.loc["db", "success"] == 50 and table.loc["db", "paper"] == 60.5
    assert (tmp_path / "a/report.md").read_text() == made.markdown()
    assert r"50.0 $\pm$ 20.4" in (tmp_path / "a/report.tex").read_text()


# ---- the paper's tables ---------------------------------------------------------------------------------------------
def test_an_endpoints_evaluation_fills_its_row_of_table_1(tmp_path):
    settings = {"source": "official", "rules": "agentbench"}
    table = render(1, [evaluation(tmp_path, grid(FIVE), settings, label="gpt-5", kind="endpoint")], None)
    ours = table[table["ours"].notna()]
    assert set(ours["model"]) == {"GPT-5"} and len(ours) == 6 and (ours["ours"] == 50).all()
    assert ours.set_index("column").loc["KG", "paper"] == 64.1 and ours.set_index("column").loc["AVG", "unit"] == "evaluation seeds"


def test_a_trained_runs_evaluation_fills_its_methods_row(tmp_path):
    made = evaluation(tmp_path, grid(FIVE), method="agentrl", train_seed=0, step=3)
    table = render(1, [made], tmp_path / "tables")
    assert set(table[table["ours"].notna()]["model"]) == {"AgentRL"}
    assert "50.0 ± 20.4" in (tmp_path / "tables/table_1.md").read_text()
    label, printed = report(made).tasks[["paper_row", "paper"]].iloc[-1]
    assert (label, printed) == ("AgentRL", paper(1).query("model == 'AgentRL' and column == 'AVG'")["mean"].item())


# ---- other tools ----------------------------------------------------------------------------------------------------
def test_lm_evals_form(two):
    made = lm_eval_results(two)
    db, kg = made["results"]["agentbench_db"], made["results"]["agentbench_kg"]
    assert db["success,none"] == 0.5 and db["success_stderr,none"] == pytest.approx(np.std([1, 0.75, 0.25, 0], ddof=1) / 2)
    assert kg["success,none"] == pytest.approx(7 / 15) and made["infrastructure_faults"] == 1
    assert made["results"]["agentbench"]["success,none"] == pytest.approx((0.5 + 7 / 15) / 2)
    assert made["n-samples"]["agentbench_kg"] == {"original": 4, "effective": 15} and "lm_eval_version" not in made
    assert made["configs"]["agentbench_db"]["metadata"] == {"version": 1.0, "turn_limit": 6, "source": "generated", "size": "micro",
                                                            "rules": "strict", "split": "test"}
    json.dumps(made, allow_nan=False)
    printed = make_table(made).replace(" ", "").splitlines()                            # lm-eval's own view of it
    assert [line for line in printed if "DB" in line] == ["|-DB|1|none|0|score|↑|0.5000|±|0.1141|"]
    assert printed[printed.index("|-DB|1|none|0|score|↑|0.5000|±|0.1141|") + 1] == "|||none|0|success|↑|0.5000|±|0.2282|"


def test_model_card_round_trip(two, tmp_path):
    from huggingface_hub import ModelCard

    model_card(two).save(tmp_path / "card.md")
    found = {(one.dataset_type, one.metric_type): one for one in ModelCard.load(tmp_path / "card.md").data.eval_results}
    assert len(found) == 4 and found[("agentbench-db-generated", "success")].metric_value == 50.0
    one = found[("agentbench-kg-generated", "success")]
    assert one.metric_value == pytest.approx(100 * 7 / 15, abs=1e-3) and one.dataset_split == "test"
    assert one.dataset_args == {"rules": "strict", "turn_limit": 6, "temperature": 0.8, "seeds": [0, 1, 2, 3]}


def test_inspects_logs(two, tmp_path):
    log = pytest.importorskip("inspect_ai.log", reason="inspect_ai is not installed")
    paths = inspect_logs(two, tmp_path)
    assert [path.name for path in paths] == ["db.eval", "kg.eval"]
    db, kg = (log.read_eval_log(str(path)) for path in paths)
    assert db.results.scores[0].metrics["mean"].value == 0.5 and db.eval.config.epochs == 4 and len(db.samples) == 16
    assert {(one.id, one.epoch): one.scores["success"].value for one in db.samples}[("db-1", 2)] == 1.0
    lost, = [one for one in kg.samples if one.error]
    assert lost.error.message == "model error: EndpointError: down" and lost.scores is None and kg.results.completed_samples == 15
    assert len(log.list_eval_logs(str(tmp_path))) == 2


def test_without_inspect_the_rest_is_written(two, tmp_path, monkeypatch):
    for name in ("inspect_ai", "inspect_ai.log"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    told = write_all(two, tmp_path)
    assert "inspect_ai is not installed (pip install -e '.[inspect]')" in told[-1]
    assert json.loads((tmp_path / "results_lm_eval.json").read_text()) and (tmp_path / "model_card.md").exists()
    with pytest.raises(ImportError, match=r"inspect_ai is not installed; pip install -e '.\[inspect\]'"):
        inspect_logs(two, tmp_path)
