"""Transfer: stock tasks of lm-eval changed in nothing but their source, canaries, seeds, what was cut, records."""

import io
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import datasets
import pytest
import torch
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks._yaml_loader import load_yaml
from models import tiny_model, tiny_tokenizer
from transfer_data import Engine, Recorder, gold, write_benchmarks

from eppo.chat import ChatFormat
from eppo.policy import load_tokenizer
from eval import transfer, transfer_models
from eval.transfer import Setting, Sparse, check_canary, evaluate_transfer, find_tasks, one_pass
from eval.transfer_models import Canary, Watched, request_seed
from eval.transfer_records import read_transfer
from eval.transfer_tasks import DEFAULT, STOCK, find_stock, local_tasks, stock_folder

PART = ("aime24", "aime25", "gsm8k")


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory):
    """`datasets` remembers what it has read by path; nothing of these files is to stay."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))
        yield


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_benchmarks(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def found(data, tmp_path_factory):
    return find_tasks(list(STOCK), data, tmp_path_factory.mktemp("tasks"))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "model"
    tiny_model().save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def trusted(monkeypatch):
    """Canaries have tests of their own; here they count as passed, which saves two thirds of the time."""
    monkeypatch.setattr(transfer, "check_canary", lambda *_: {"perfect": 1.0, "silent": 0.0})


def hf(**settings):
    return HFLM(pretrained=tiny_model(), tokenizer=tiny_tokenizer(), batch_size=3, **settings)


# ---- tasks
def test_local_files_change_nothing_but_the_source(data, tmp_path):
    assert local_tasks(list(STOCK), data, tmp_path) == {}
    for stock in STOCK.values():
        for task in stock.subtasks or (stock.name,):
            path = stock_folder() / stock.yaml
            ours = load_yaml(tmp_path / f"{task}.yaml", resolve_func=False)
            theirs = load_yaml(path.with_name(f"{task}.yaml") if stock.subtasks else path, resolve_func=False)
            assert {key for key in ours | theirs if ours.get(key) != theirs.get(key)} <= {"dataset_path", "dataset_name", "dataset_kwargs"}
            assert ours["dataset_path"] == "json" and theirs["dataset_path"] != "json"


def test_columns_are_renamed_for_a_task_that_spells_them_otherwise(data, tmp_path):
    local_tasks(["aime24"], data, tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "aime24-renamed.jsonl").read_text().splitlines()]
    assert [set(row) for row in rows] == [{"id", "Problem", "Answer"}] * 3 and rows[2]["Answer"] == "512"


@pytest.mark.parametrize("name", STOCK)
def test_perfect_answers_score_one_and_empty_ones_nothing(name, found):
    assert check_canary(found, STOCK[name], Setting()) == {"perfect": 1.0, "silent": 0.0}


def test_a_canary_that_falls_stops_the_evaluation(found, monkeypatch):
    right = transfer_models.ANSWERS["gsm8k"]
    monkeypatch.setitem(transfer_models.ANSWERS, "gsm8k", lambda doc: "#### 30" if "pens" in doc["question"] else right(doc))
    with pytest.raises(ValueError, match=r"perfect answers score 0.75 on gsm8k \(exact_match,strict-match\); wrong: gsm8k 0"):
        check_canary(found, STOCK["gsm8k"], Setting())


def test_an_answer_to_nothing_is_noticed(found, monkeypatch):
    monkeypatch.setattr(Canary, "generate_until", lambda self, requests: [gold(request) for request in requests])
    with pytest.raises(ValueError, match="empty answers score 1.0 on aime24"):
        check_canary(found, STOCK["aime24"], Setting())


def test_a_task_that_is_not_there_is_skipped_by_name_with_the_reason(data, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "aime25.jsonl").write_bytes((data / "aime25.jsonl").read_bytes())
    found = find_tasks(["aime25", "math500", "gpqa"], tmp_path / "data", tmp_path / "tasks")
    assert list(found.ready) == ["aime25"]
    assert "no local file math500*.jsonl" in found.skipped["minerva_math500"] and "Hub" in found.skipped["minerva_math500"]
    assert "gated" in found.skipped["gpqa_main_cot_zeroshot"] and "HF_TOKEN" in found.skipped["gpqa_main_cot_zeroshot"]
    with pytest.raises(ValueError, match="no transfer task can be read here: gpqa_main_cot_zeroshot: .*gated"):
        find_tasks(["gpqa"], None, tmp_path / "tasks")


def test_names_are_checked(data, tmp_path):
    with pytest.raises(ValueError, match="unknown transfer task 'gsm8'; did you mean 'gsm8k'"):
        find_tasks(["gsm8"], None, tmp_path)
    with pytest.raises(ValueError, match="same stock task twice"):
        find_tasks(["math500", "minerva_math500"], None, tmp_path)
    with pytest.raises(ValueError, match="no model for this name found! Supported model names: .*hf"):
        evaluate_transfer("some-model", ["aime24"], backend="hff", data=data, out=tmp_path)
    assert {find_stock(name).name for name in DEFAULT} == set(DEFAULT.values())


def test_without_its_few_shot_split_a_task_is_played_zero_shot_and_says_so(data, tmp_path):
    (tmp_path / "gsm8k_test.jsonl").write_bytes((data / "gsm8k_test.jsonl").read_bytes())
    rows = evaluate_transfer(Recorder(), ["gsm8k"], data=tmp_path, out=tmp_path / "out")
    [one] = rows.attrs["transfer"]["passes"]
    assert one["zero_shot"] and one["few_shot"] == 0 and set(rows["few_shot"]) == {0}


def test_options_of_gpqa_depend_on_the_item_alone_and_arrive_whole(data, tmp_path, trusted):
    prompts = []
    for tasks in (["gpqa"], ["gsm8k", "gpqa"], ["gpqa"]):
        lm = Recorder()
        evaluate_transfer(lm, tasks, data=data, out=tmp_path, seeds=(len(prompts),), temperature=1.0)
        prompts.append([request.args[0] for request in lm.asked if request.task_name.startswith("gpqa")])
    assert prompts[0] == prompts[1] == prompts[2] and len(set(prompts[0])) == 7
    assert "cyclopenta[c]pyridine" in prompts[0][0]
    assert len({prompt.index("(A)") < prompt.index(right) < prompt.index("(B)") for prompt, right in
                zip(prompts[0], ("cyclopenta", "Jupiter", "neon", "helium", "muon", "ammonia", "97"))}) == 2, "options are shuffled"


# ---- what the stock extractions read
@pytest.mark.parametrize("name, item, text, strict, flexible", [
    ("minerva_math500", 0, r"so \[ \boxed{\frac{3}{4}} \]", False, True),
    ("minerva_math500", 1, r"The domain is \boxed{[2,5]}.", False, True),
    ("minerva_math500", 3, r"$x=2$ and therefore $\boxed{42}$", False, True),
    ("hendrycks_math500", 3, r"It is \boxed{42}.", False, False),       # reads what stands between the first and the last $
    ("hendrycks_math500", 3, "It is $42$.", True, True),
    ("gsm8k", 0, "That makes 29.", False, True),
    ("gsm8k", 0, "They cost $29.00.", False, False),                    # 29.00 is not 29
    ("gsm8k", 1, "#### 1,250", True, True),
    ("gsm8k", 0, "#### 5\n#### 6\n#### 29", False, True),               # strict takes the first marker, flexible the last number
    ("mmlu_pro", 0, "The answer is (A).", True, True),
    ("mmlu_pro", 0, "(A)", False, False),
    ("gpqa_main_generative_n_shot", 0, None, False, True),              # the letter alone, in brackets
    ("aime24", 1, r"<think>maybe \boxed{1}</think> \boxed{72}", True, True),
])
def test_what_strict_and_flexible_read(name, item, text, strict, flexible, found):
    def answer(request, seed):
        return "" if request.doc_id != item else text or request.doc["answer"]

    results, _ = one_pass(found, STOCK[name], Setting(few_shot=0), Recorder(answer), 0, 0)
    samples = [sample for sample in results["samples"][(STOCK[name].subtasks or (name,))[0]] if sample["doc_id"] == item]
    for extraction, right in ((STOCK[name].strict, strict), (STOCK[name].flexible, flexible)):
        metric, by = extraction.split(",")
        assert [sample[metric] for sample in samples if sample["filter"] == by] == [right], extraction


# ---- records
def test_records_hold_everything_and_a_pass_is_not_repeated(checkpoint, data, tmp_path, monkeypatch, trusted):
    lines = []
    rows = evaluate_transfer(checkpoint, data=data, out=tmp_path, items=14, max_new_tokens=4, report=lines.append)
    assert lines[0].startswith("canary: 1.0 and 0 on aime24") and len(lines) == 1 + len(DEFAULT)
    assert rows.groupby("benchmark").size().to_dict() == {"AIME24": 3, "AIME25": 3, "MATH500": 4, "GSM8K": 4, "MMLU-Pro": 14, "GPQA": 7}
    assert not rows[["strict", "flexible"]].to_numpy().any() and rows["truncated"].notna().all() and rows["prompt_cut"].notna().all()
    index = rows.attrs["transfer"]
    assert {one["stock"]: one["few_shot"] for one in index["passes"]} == {
        "aime24": 0, "aime25": 0, "minerva_math500": 4, "gsm8k": 5, "mmlu_pro": 5, "gpqa_main_cot_zeroshot": 0}
    assert set(index["canary"]) == set(DEFAULT.values()) and index["versions"]["lm-eval"] and not index["skipped"]
    whole = json.loads((tmp_path / index["passes"][3]["file"]).read_text())
    assert {"results", "configs", "versions", "n-shot", "n-samples", "config", "git_hash", "lm_eval_version"} <= set(whole)
    assert whole["eppo"]["chat_template"] == tiny_tokenizer().chat_template and len(whole["eppo"]["chat_template_sha256"]) == 64
    assert whole["configs"]["gsm8k"]["generation_kwargs"]["max_gen_toks"] == 4 and whole["config"]["fewshot_seed"] == 1234
    sample = json.loads((tmp_path / index["passes"][3]["file"]).with_suffix(".samples.jsonl").read_text().splitlines()[0])
    assert {"doc", "arguments", "resps", "prompt_hash", "eppo"} <= set(sample)

    monkeypatch.setattr(transfer, "make_lm", lambda *args: pytest.fail("asked again"))
    again = evaluate_transfer(checkpoint, data=data, out=tmp_path, items=14, max_new_tokens=4)
    assert again.equals(rows) and read_transfer(tmp_path).equals(rows)
    for change in ({"max_new_tokens": 5}, {"chat_template": False}, {"few_shot": 1}, {"temperature": 0.5}):
        with pytest.raises(pytest.fail.Exception, match="asked again"):
            evaluate_transfer(checkpoint, ["gsm8k"], data=data, out=tmp_path, **({"items": 14, "max_new_tokens": 4} | change))


def test_a_runs_model_carries_its_method_and_training_seed(checkpoint, data, tmp_path):
    config = {"method": "eppo", "seed": 3, "model": {"path": "micro"}}
    (checkpoint.parent / "run.json").write_text(json.dumps({"config": config}))
    rows = evaluate_transfer(checkpoint, ["aime24"], data=data, out=tmp_path, max_new_tokens=2)
    (checkpoint.parent / "run.json").unlink()
    assert rows[["method", "train_seed", "run"]].drop_duplicates().to_numpy().tolist() == [["eppo", 3, checkpoint.parent.name]]


def test_the_tokenizer_is_the_one_that_was_trained_with(checkpoint):
    text = 'look {"word": "apple"} 2026'
    lm = transfer.make_lm(checkpoint, "hf", None, 1)
    assert lm.tok_encode(text) == tiny_tokenizer().encode(text) == load_tokenizer(str(checkpoint)).encode(text)


def test_a_prompt_is_laid_out_as_in_training_and_agent_evaluation(found):
    lm, chat = hf(), ChatFormat(tiny_tokenizer())
    results, _ = one_pass(found, STOCK["gsm8k"], Setting(few_shot=0, system="Be brief.", generation={"max_gen_toks": 2}), lm, 0, 0)
    for sample in results["samples"]["gsm8k"]:
        messages = [{"role": "system", "content": "Be brief."},
                    {"role": "user", "content": f"Question: {sample['doc']['question']}\nAnswer:"}]
        assert lm.tok_encode(sample["arguments"][0][0]) == chat.opening_ids(messages, [])


def test_what_stays_on_a_page_is_a_line_a_pass(checkpoint, data, tmp_path, capfd):
    datasets.enable_progress_bars()
    evaluate_transfer(checkpoint, ["gsm8k", "minerva_math500"], data=data, out=tmp_path, max_new_tokens=2, report=print)
    out, err = capfd.readouterr()
    assert [line.split(",")[0] for line in out.splitlines()] == ["canary: 1.0 and 0 on gsm8k", "gsm8k", "minerva_math500"]
    assert not any(word in err for word in ("Map", "Filter", "Generating", "Running generate_until")), err
    assert not datasets.utils.are_progress_bars_disabled()


def test_long_passes_say_now_and_then_how_far_they_are():
    out = io.StringIO()
    for every_s, told in ((60.0, ""), (0.0, "Running: 1/9\nRunning: 2/9\n")):
        stream = Sparse(out, every_s)
        assert stream.write("\rRunning: 1/9") == 13 and stream.write("\n") == 1 and stream.write("\rRunning: 2/9") == 13
        assert out.getvalue() == told


# ---- seeds and repeats
def test_every_request_has_a_seed_of_its_own_and_seeds_change_the_samples(data, tmp_path, trusted):
    lm = Recorder()
    settings = {"data": data, "out": tmp_path, "seeds": (0, 1, 2, 3), "temperature": 0.7, "aime_samples": 2}
    rows = evaluate_transfer(lm, PART, **settings)
    asked = [request.args[1]["seed"] for request in lm.asked]
    assert len(asked) == 4 * (3 * 2 + 3 * 2 + 4) == len(set(asked)) == len(rows)
    assert asked[0] == request_seed(0, 0, lm.asked[0].args[0]) and set(rows["seed"]) == set(asked)
    assert {request.args[1]["temperature"] for request in lm.asked} == {0.7} and all(request.args[1]["do_sample"] for request in lm.asked)
    second = Recorder()
    evaluate_transfer(second, PART, **settings)
    assert [request.args[1]["seed"] for request in second.asked] == asked


def test_at_temperature_zero_seeds_cannot_differ_and_the_record_says_so(data, tmp_path):
    lm = Recorder()
    rows = evaluate_transfer(lm, ["aime24"], data=data, out=tmp_path, seeds=(5, 6, 7), aime_samples=8)
    assert len(lm.asked) == 3 and set(rows["eval_seed"]) == {5} and set(rows["repeat"]) == {0}
    assert "Temperature 0: seeds and repeats cannot differ" in rows.attrs["transfer"]["notes"][0]


def test_all_samples_enter_avg_at_k(data, tmp_path):
    rows = evaluate_transfer(Recorder(lambda request, seed: gold(request) if seed % 3 == 0 else ""), ["aime24"], data=data, out=tmp_path,
                             temperature=1.0, aime_samples=8)
    assert rows.groupby("item")["seed"].nunique().tolist() == [8, 8, 8]
    assert rows["strict"].tolist() == (rows["seed"] % 3 == 0).tolist() and 0 < rows["strict"].mean() < 1


def test_a_sampled_text_depends_on_its_seed_and_not_on_its_batch(found):
    def texts(seed, items=None):
        setting = Setting(items=items, generation={"max_gen_toks": 8, "temperature": 1.0, "do_sample": True})
        results, _ = one_pass(found, STOCK["gsm8k"], setting, hf(), seed, 0)
        return [sample["resps"][0][0] for sample in results["samples"]["gsm8k"] if sample["filter"] == "strict-match"]

    first = texts(0)
    assert texts(0) == first and texts(0, items=2) == first[:2] and texts(1) != first


# ---- what was cut
def test_cut_texts_and_prompts_of_transformers(found):
    lm, limit = hf(max_length=120), 6
    setting = Setting(generation={"max_gen_toks": limit, "until": ["word", "<|im_end|>"]})
    results, more = one_pass(found, STOCK["gsm8k"], setting, lm, 0, 0)
    prompts = {sample["doc_id"]: sample["arguments"][0][0] for sample in results["samples"]["gsm8k"]}
    for item, prompt in prompts.items():
        mark, ids = more["marks"]["gsm8k", item], lm.tok_encode(prompt)
        assert mark["prompt_tokens"] == len(ids) and mark["prompt_cut"] == (len(ids) > 120 - limit)
        seen = torch.tensor([ids[-(120 - limit):]])
        new = lm.model.generate(input_ids=seen, attention_mask=torch.ones_like(seen), max_new_tokens=limit, do_sample=False,
                                pad_token_id=lm.tokenizer.pad_token_id)[0, seen.shape[1]:]
        text = lm.tokenizer.decode(new)
        assert mark["truncated"] == (lm.eot_token_id not in new.tolist() and "word" not in text)
    assert all(more["marks"]["gsm8k", item]["prompt_cut"] for item in prompts)


def test_a_row_ends_at_its_end_token_though_its_batch_goes_on(found):
    lm = hf()
    word, other, end = lm.tok_encode("apple")[0], lm.tok_encode("delta")[0], lm.eot_token_id
    rows = torch.tensor([[word, end, other, other], [word, word, word, word], [word, word, word, end]])
    lm._model_generate = lambda **batch: torch.cat([batch["context"], rows[:len(batch["context"])]], 1)
    results, more = one_pass(found, STOCK["aime24"], Setting(generation={"max_gen_toks": 4}), lm, 0, 0)
    texts = sorted((sample["resps"][0][0], more["marks"]["aime24", sample["doc_id"]]["truncated"])
                   for sample in results["samples"]["aime24"])
    word = lm.tokenizer.decode([word])
    assert texts == [(word, False), (word * 3, False), (word * 4, True)]
    assert lm.model.generation_config.eos_token_id is None, "the tokenizer alone knows the end"


def test_an_engine_tells_how_each_text_ended(found):
    lm = Engine(lambda request, seed: "so far ..." if request.doc_id == 2 else gold(request))
    results, more = one_pass(found, STOCK["gsm8k"], Setting(), lm, 0, 0)
    assert [more["marks"]["gsm8k", item]["truncated"] for item in range(4)] == [False, False, True, False]
    assert results["results"]["gsm8k"]["exact_match,strict-match"] == 0.75
    assert "_model_generate" not in vars(lm) and lm.cache_hook.dbdict is None, "the model is left as it was"


def test_an_unfinished_thought_is_no_answer(found):
    lm = Engine(lambda request, seed: r"<think>maybe \boxed{5} ..." if request.doc_id == 0 else rf"<think>no</think> {gold(request)}")
    lm.think_end_token = "</think>"
    results, more = one_pass(found, STOCK["aime24"], Setting(), lm, 0, 0)
    right = {sample["doc_id"]: sample["exact_match"] for sample in results["samples"]["aime24"]}
    assert right == {0: 0, 1: 1, 2: 1} and more["marks"]["aime24", 0]["truncated"]


def test_a_context_too_short_for_the_new_tokens_names_the_cure(found):
    with pytest.raises(ValueError, match="aime24 generates up to 32768 tokens, but the model's context is .*max_new_tokens"):
        one_pass(found, STOCK["aime24"], Setting(), hf(max_length=512), 0, 0)


def test_two_bos_tokens_are_refused(found):
    lm = hf()
    lm.tokenizer = load = lm.tokenizer.__class__(tokenizer_object=lm.tokenizer.backend_tokenizer, bos_token="<|im_start|>",
                                                 eos_token="<|im_end|>", pad_token="<|im_end|>")
    load.chat_template = "<|im_start|><|im_start|>{{ messages[0]['content'] }}"
    with pytest.raises(ValueError, match="begins with two BOS tokens"):
        one_pass(found, STOCK["aime24"], Setting(generation={"max_gen_toks": 2}), lm, 0, 0)


# ---- an endpoint
@pytest.fixture
def server():
    """An OpenAI-compatible endpoint that solves AIME problems; the one of 72 it does not finish."""
    payloads = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            payload = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            payloads.append(payload)
            question = payload["messages"][-1]["content"]
            text = r"\boxed{5}" if "primes" in question else r"\boxed{512}" if "2^" in question else "Let us see"
            choice = {"index": 0, "message": {"role": "assistant", "content": text},
                      "finish_reason": "length" if text.startswith("Let") else "stop"}
            body = json.dumps({"choices": [choice], "usage": {}}).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args):
            pass

    httpd = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=httpd.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{httpd.server_port}/v1/chat/completions", payloads
    httpd.shutdown()
    httpd.server_close()


@pytest.mark.parametrize("concurrent", [1, 3])
def test_an_endpoint_gets_a_seed_with_each_request_and_tells_what_was_cut(concurrent, server, data, tmp_path):
    url, payloads = server
    rows = evaluate_transfer("some-model", ["aime24"], backend="local-chat-completions", batch_size=1, data=data, out=tmp_path,
                             model_args={"base_url": url, "num_concurrent": concurrent}, seeds=(0, 1), temperature=0.7, max_new_tokens=64)
    assert rows["strict"].tolist() == [True, False, True] * 2 and rows["truncated"].tolist() == [False, True, False] * 2
    assert len({payload["seed"] for payload in payloads}) == 6 and {payload["temperature"] for payload in payloads} == {0.7}
    assert {payload["max_tokens"] for payload in payloads} == {64} and {payload["model"] for payload in payloads} == {"some-model"}
    assert rows["prompt_cut"].isna().all(), "an endpoint does not tell"


def test_watching_passes_everything_else_through():
    lm = hf()
    watched = Watched(lm)
    assert watched.tokenizer is lm.tokenizer and watched.max_length == lm.max_length and watched.rank == 0
    assert watched.chat_template(True) == lm.chat_template(True) and watched.tokenizer_name == lm.tokenizer_name
