"""The transfer table: the paper's numbers as counts, ours pooled and beside them, one seed n/a."""

import json
import math

import pandas as pd
import pytest

from eval.statistics import wilson
from eval.tables import paper
from eval.transfer_table import layout, notes, transfer_table
from eval.transfer_tasks import STOCK


def rows_of(answers, label="EPPO", method="eppo", train_seed=0, eval_seed=0, truncated=False, limit=None, skipped=None, notes=()):
    """Rows as evaluate_transfer returns them. `answers`: stock -> for each item (strict, flexible), or a list of these for repeats."""
    rows = []
    for stock, items in answers.items():
        for item, repeats in enumerate(items):
            for repeat, (strict, flexible) in enumerate(repeats if isinstance(repeats, list) else [repeats]):
                rows.append({"label": label, "run": None, "method": method, "backbone": "micro", "train_seed": train_seed,
                             "benchmark": STOCK[stock].column, "stock": stock, "task": stock, "item": item, "eval_seed": eval_seed,
                             "repeat": repeat, "strict": bool(strict), "flexible": bool(flexible), "truncated": truncated,
                             "prompt_cut": item == 0, "few_shot": 0})
    frame = pd.DataFrame(rows)
    frame.attrs["transfer"] = {
        "model": {"label": label, "run": None, "method": method, "train_seed": train_seed, "backbone": "micro", "fingerprint": "0",
                  "model": "/a/path"}, "versions": {"lm-eval": "0.4.13"}, "skipped": skipped or {}, "notes": list(notes),
        "setting": {"chat_template": True}, "passes": [
            {"stock": stock, "few_shot": 0, "version": 1.0, "generation": {"max_gen_toks": limit}, "data": "0", "zero_shot": False}
            for stock in answers]}
    return frame


def cell(table, column, extraction="flexible", model="EPPO"):
    [(_, found)] = table[(table[["model", "column", "extraction"]] == [model, column, extraction]).all(axis=1)].iterrows()
    return found


def counts(percent, n, cut_off=False):
    """Numbers of right answers out of n that are printed as `percent` with one decimal."""
    rounding = math.floor if cut_off else round
    return [k for k in range(n + 1) if rounding(1000 * k / n + (1e-9 if cut_off else 0)) == round(10 * percent)]


# ---- the paper
@pytest.mark.parametrize("column, n, expected", [("GPQA", 448, [113, 121, 122]), ("MATH500", 500, [252, 280, 299])])
def test_printed_numbers_are_counts(column, n, expected):
    printed = paper(3)[paper(3)["column"] == column].set_index("model")["mean"]
    assert list(printed.index) == ["Qwen2.5-3B-Instruct", "AgentRL", "EPPO"]
    assert [counts(value, n) for value in printed] == [[k] for k in expected]


def test_gpqa_is_the_main_set():
    assert counts(27.0, 198) == counts(27.0, 198, cut_off=True) == [], "no count on Diamond's 198 prints as 27.0"
    assert counts(27.0, 448) == [121]


def test_aime_is_one_sample_of_the_sixty_problems():
    printed = paper(3)[paper(3)["column"] == "AIME24+25"]["mean"].tolist()
    assert printed == [3.3, 6.6, 5.0]
    assert [counts(value, 60, cut_off=True) for value in printed] == [[2], [4], [3]]
    assert counts(6.6, 60) == [], "6.6 is 4/60 cut off, not rounded"


def test_every_printed_number_is_a_count_of_its_benchmark():
    sizes = {"AIME24+25": 60, "MATH500": 500, "GSM8K": 1319, "MMLU-Pro": 12032, "GPQA": 448}
    for row in paper(3).itertuples():
        assert counts(row.mean, sizes[row.column]) or counts(row.mean, sizes[row.column], cut_off=True), row


# ---- ours
def test_aime_is_pooled_over_both_years_from_first_samples():
    answers = {"aime24": [[(1, 1), (0, 0)], [(0, 0), (0, 0)]], "aime25": [[(1, 1), (1, 1)], [(0, 0), (1, 1)]]}
    table = transfer_table(rows_of(answers))
    assert cell(table, "AIME24+25")[["ours", "n", "size"]].tolist() == [50.0, 4, 60]
    assert cell(table, "AIME24+25 avg@2")["ours"] == 50.0 and cell(table, "AIME24 avg@2")["ours"] == 25.0
    assert cell(table, "AIME25 avg@2")["ours"] == 75.0
    assert cell(table, "AIME24+25")["paper"] == 5.0 and cell(table, "AIME24+25")["difference"] == 45.0
    assert pd.isna(cell(table, "AIME24+25 avg@2")["paper"]), "avg@k is not the paper's column"


def test_samples_that_are_all_wrong_have_no_interval():
    answers = {year: [[(0, 0), (0, 0)]] * 2 for year in ("aime24", "aime25")}
    assert layout(transfer_table(rows_of(answers))).set_index("row").loc["ours, strict", "AIME24+25 avg@2"] == "0.0 ± n/a"


def test_columns_stand_in_the_papers_order():
    table = transfer_table(rows_of({"gsm8k": [(1, 1)], "aime25": [(0, 0)], "gsm8k_cot": [(1, 1)]}))
    assert list(layout(table).columns)[2:] == ["AIME24+25", "AIME25", "MATH500", "GSM8K", "GSM8K (gsm8k_cot)", "MMLU-Pro", "GPQA"]


def test_one_year_alone_is_no_pooled_score():
    table = transfer_table(rows_of({"aime24": [(1, 1), (0, 0)]}))
    assert pd.isna(cell(table, "AIME24+25")["ours"]) and cell(table, "AIME24+25")["size"] == 60 and cell(table, "AIME24")["ours"] == 50.0
    assert layout(table).set_index("row").loc["ours, strict", "AIME24+25"] == "n/a"


def test_one_seed_has_no_deviation_but_wilsons_interval():
    table = transfer_table(rows_of({"gsm8k": [(1, 1), (0, 1), (0, 0), (0, 0)]}))
    strict, flexible = cell(table, "GSM8K", "strict"), cell(table, "GSM8K")
    assert (strict["ours"], flexible["ours"]) == (25.0, 50.0) and pd.isna(flexible["std"])
    assert [flexible["low"], flexible["high"]] == [100 * bound for bound in wilson(2, 4)]
    text = layout(table).set_index("row")["GSM8K"]
    assert text["ours, flexible"] == "50.0 ± n/a [15.0, 85.0]" and text["ours, strict"].startswith("25.0 ± n/a")
    assert text["text / prompt cut"] == "0 % / 25 %" and text["paper"].tolist() == ["60.7", "66.6", "71.0"]


def test_several_seeds_have_the_sample_deviation():
    scores = [[(1, 1)] * k + [(0, 0)] * (50 - k) for k in (25, 26, 24, 27)]
    for kind, unit in (("train_seed", "training seeds"), ("eval_seed", "evaluation seeds")):
        table = transfer_table([rows_of({"gsm8k": items}, **{kind: seed}) for seed, items in enumerate(scores)])
        found = cell(table, "GSM8K")
        assert found["ours"] == pytest.approx(51.0) and found["std"] == pytest.approx(2.58, abs=0.005)    # ddof 0 would be 2.24
        assert (found["seeds"], found["unit"], found["n"]) == (4, unit, 50)
        assert found["values"] == "50.00; 52.00; 48.00; 54.00"


def test_a_variant_is_a_column_of_its_own_without_the_papers_number():
    table = transfer_table(rows_of({"gsm8k": [(1, 1)], "gsm8k_cot": [(0, 1)]}))
    assert cell(table, "GSM8K")["paper"] == 71.0 and pd.isna(cell(table, "GSM8K (gsm8k_cot)")["paper"])


def test_the_papers_untrained_model_is_that_model_only():
    answers = {"gsm8k": [(1, 1)]}
    assert pd.isna(cell(transfer_table(rows_of(answers, method="start")), "GSM8K", model="Warm start")["paper"])
    table = transfer_table(rows_of(answers, label="Qwen2.5-3B-Instruct", method=None))
    assert cell(table, "GSM8K", model="Qwen2.5-3B-Instruct")["paper"] == 60.7


def test_what_was_skipped_stands_in_the_table_with_the_reason():
    skipped = {"gpqa_main_cot_zeroshot": "gated", "aime24": "no file", "aime25": "no file"}
    table = transfer_table(rows_of({"gsm8k": [(1, 1)]}, skipped=skipped))
    for extraction in ("strict", "flexible"):
        gpqa = cell(table, "GPQA", extraction)
        assert (gpqa["skipped"], gpqa["n"], gpqa["size"], gpqa["paper"]) == ("gated", 0, 448, 27.2) and pd.isna(gpqa["ours"])
    assert cell(table, "AIME24+25")["skipped"] == cell(table, "AIME24")["skipped"] == "no file" and cell(table, "GSM8K")["skipped"] == ""
    text = layout(table).set_index("row")
    assert text.loc["ours, strict", ["AIME24+25", "GPQA", "MMLU-Pro"]].tolist() == ["skipped", "skipped", ""], "MMLU-Pro: not asked for"
    assert text.loc["text / prompt cut", "GPQA"] == "" and text["GPQA"]["paper"].tolist()[-1] == "27.2"


def test_one_model_of_two_skipped_what_the_other_played():
    played = rows_of({"gpqa_main_cot_zeroshot": [(1, 1)]})
    other = rows_of({"gsm8k": [(1, 1)]}, label="AgentRL", method="agentrl", skipped={"gpqa_main_cot_zeroshot": "gated"})
    table = transfer_table([played, other])
    assert cell(table, "GPQA")[["ours", "skipped"]].tolist() == [100.0, ""] and cell(table, "GPQA", model="AgentRL")["skipped"] == "gated"


def test_unknown_is_not_zero():
    table = transfer_table(rows_of({"gsm8k": [(1, 1)]}, truncated=None))
    assert layout(table).set_index("row").loc["text / prompt cut", "GSM8K"] == "n/a / 100 %"


def test_notes_say_what_was_played_and_what_not(tmp_path):
    frame = rows_of({"gsm8k": [(1, 1)] * 4, "aime24": [(0, 0)] * 30, "aime25": [(0, 0)] * 30}, limit=32,
                    skipped={"gpqa_main_cot_zeroshot": "gated"}, notes=["Temperature 0: ..."])
    table = transfer_table(frame, tmp_path)
    text = "\n".join(notes(table, [frame]))
    for part in ("lm-eval 0.4.13", "gsm8k version 1.0, 0-shot, chat template on, temperature 0, at most 32 new tokens, extractions "
                 "exact_match,strict-match / exact_match,flexible-extract", "Only a part was played: GSM8K 4 of 1319.",
                 "they are no scores", "One seed: ± n/a", "Skipped: GPQA, gpqa_main_cot_zeroshot (gated).", "Temperature 0: ..."):
        assert part in text, part
    assert "AIME24+25 60 of 60" not in text and "say little" not in text
    cut = rows_of({"gsm8k": [(0, 0)]}, truncated=True)
    assert "More than 20% of the texts were cut" in "\n".join(notes(transfer_table(cut), [cut]))
    printed = {suffix: (tmp_path / f"table_3{suffix}").read_bytes() for suffix in (".md", ".tex", ".csv", ".json")}
    assert b"50.4" in printed[".md"], "a column that was not played still shows the paper's numbers"
    sidecar = json.loads(printed[".json"])
    assert sidecar["transfer"][0]["passes"][0]["stock"] == "gsm8k" and "/a/path" not in printed[".json"].decode()
    transfer_table(frame, tmp_path)
    assert printed == {suffix: (tmp_path / f"table_3{suffix}").read_bytes() for suffix in printed}
