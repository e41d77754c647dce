"""Miniature transfer benchmarks in the formats of the real ones, written by hand, and LMs of lm-eval that stand in for engines."""

import json
from collections import namedtuple
from types import SimpleNamespace

from lm_eval.api.model import LM

from eval.transfer_models import ANSWERS
from eval.transfer_tasks import SUBJECTS

AIME = [("How many primes lie below 12?", "5"), ("Find the least common multiple of 8 and 9.", "72"), ("Find $2^{9}$.", "512")]
MATH = [("Solve $x^2=9/16$ for $x>0$.", r"A root: \boxed{\frac{3}{4}}."),
        ("What is the domain of $\\sqrt{5-x}$ on $x\\ge 2$?", r"It is $\boxed{[2,5]}$."),
        ("Give the zero matrix.", r"So $\boxed{\begin{pmatrix} 0 \\ 0 \end{pmatrix}}$."), ("What is $6\\cdot 7$?", r"It is $\boxed{42}$.")]
GSM8K = [("Ann has 4 pens and buys 25. How many?", "4+25=<<4+25=29>>29\n#### 29"),
         ("A box holds 50 caps; 25 boxes?", "25*50=1250\n#### 1,250"),
         ("It was 3 degrees and fell by 10. Now?", "3-10=-7\n#### -7"), ("Two and two?", "2+2=4\n#### 4")]
GPQA = [("Which ring system has a pyridine fused to a five-ring?", "cyclopenta[c]pyridine", "indole", "furan", "cyclohexane"),
        ("Which is the largest?", "Jupiter", "Mars", "Venus", "Earth"), ("Which is a noble gas?", "neon", "oxygen", "iron", "sulfur"),
        ("Which boils first?", "helium", "water", "iron", "salt"), ("Which is a lepton?", "muon", "proton", "pion", "kaon"),
        ("Which is a base?", "ammonia", "vinegar", "lemon juice", "aspirin"), ("Which is prime?", "97", "91", "87", "93")]


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_benchmarks(folder):
    """All files that eval/tasks names; returns the folder."""
    for year in ("24", "25"):
        write(folder / f"aime{year}.jsonl", [{"id": str(number), "problem": f"{text} (20{year})", "answer": answer}
                                             for number, (text, answer) in enumerate(AIME)])
    write(folder / "math500_test.jsonl", [{"problem": text, "solution": solution, "answer": "", "subject": "Algebra", "level": 1}
                                          for text, solution in MATH])
    write(folder / "gsm8k_test.jsonl", [{"question": text, "answer": answer} for text, answer in GSM8K])
    write(folder / "gsm8k_train.jsonl", [{"question": f"What is {n} and 1?", "answer": f"{n}+1={n + 1}\n#### {n + 1}"} for n in range(9)])
    questions = [{"question_id": 100 * number + index, "question": f"Which letter is number {index + 1}? ({subject})",
                  "options": ["alpha", "beta", "gamma", "delta"], "answer": "ABCD"[index % 4], "answer_index": index % 4,
                  "category": subject.replace("_", " ")} for number, subject in enumerate(SUBJECTS) for index in range(6)]
    write(folder / "mmlu_pro_test.jsonl", [row for row in questions if row["question_id"] % 100 < 2])
    write(folder / "mmlu_pro_validation.jsonl", [
        row | {"cot_content": f"A: Let's think step by step. Count. The answer is ({row['answer']})."} for row in questions])
    names = ("Question", "Correct Answer", "Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3")
    write(folder / "gpqa_main.jsonl", [dict(zip(names, row)) for row in GPQA])
    return folder


class Recorder(LM):
    """Keeps what it is asked; answers by a function of the request and its seed."""

    def __init__(self, answer=lambda request, seed: f"{seed}"):
        super().__init__()
        self.answer, self.asked = answer, []

    def generate_until(self, requests):
        self.asked += requests
        return [self.answer(request, request.args[1].get("seed")) for request in requests]

    def loglikelihood(self, requests):
        raise NotImplementedError

    loglikelihood_rolling = loglikelihood

    def apply_chat_template(self, chat_history, add_generation_prompt=True):
        return "|".join(f"{message['role']}: {message['content']}" for message in chat_history)

    @property
    def tokenizer_name(self):
        return "recorder"


Output = namedtuple("Output", "outputs")


class Engine(Recorder):
    """Calls the hooks in the order in which lm-eval's vLLM does: a batch first, longest prompt first, then text by text."""

    think_end_token = None

    def _model_generate(self, requests, **_):
        texts = [self.answer(request, request.args[1].get("seed")) for request in requests]
        return [Output([SimpleNamespace(text=text, finish_reason="length" if text.endswith("...") else "stop", token_ids=[1])])
                for text in texts]

    def generate_until(self, requests):
        order = sorted(range(len(requests)), key=lambda index: -len(requests[index].args[0]))
        texts = {}
        for start in range(0, len(order), 2):
            chosen = order[start:start + 2]
            for index, output in zip(chosen, self._model_generate([requests[index] for index in chosen])):
                text = output.outputs[0].text
                texts[index] = text.split(self.think_end_token)[-1].lstrip() if self.think_end_token else text
                self.cache_hook.add_partial("generate_until", requests[index].args, texts[index])
        return [texts[index] for index in range(len(requests))]


def gold(request):
    return ANSWERS[request.task_name](request.doc)
