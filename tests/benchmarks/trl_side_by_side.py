"""Multi-turn generation and training beside TRL's GRPOTrainer: same model, same tool tasks, alternating in one run.

    python tests/benchmarks/trl_side_by_side.py --rounds 3          # needs the dev extra (trl); prints a markdown table

A round is one step of each side: 8 prompts x 8 rollouts of tool dialogues (two environments, up to three calls) on a Qwen2 of hidden
size 128 with 4 layers and 1,536 tokens that has been taught the tool format. Only ratios within a run mean something on a shared
machine. Generation counts sampled tokens over the time from prompts to finished episodes, tools included; training counts all tokens
of the episodes over the time of log-probabilities, loss, backward and optimiser.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from unittest import mock

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch  # noqa: E402
from transformers.utils import get_json_schema  # noqa: E402

from envs.base import Env, Status, assistant_call  # noqa: E402
from envs.instances import Instance  # noqa: E402
from envs.tool_calls import render_turn  # noqa: E402
from eppo import policy  # noqa: E402
from eppo.algorithms import get_algorithm  # noqa: E402
from eppo.batching import to_batch  # noqa: E402
from eppo.chat import ChatFormat  # noqa: E402
from eppo.config import load_recipe  # noqa: E402
from eppo.generate import TransformersGenerator  # noqa: E402
from eppo.imitation import imitate  # noqa: E402
from eppo.learner import Learner  # noqa: E402
from eppo.policy import build_micro_model, load_policy, load_tokenizer  # noqa: E402
from eppo.rollouts import EnvPool, Job, RolloutLimits, run_jobs  # noqa: E402

PROMPTS, GROUP, MAX_TOKENS, ROUNDS = 8, 8, 128, 3
DIGITS = random.Random(1)
ROWS = [{"environment": ("add", "look")[n % 2], "a": DIGITS.randint(0, 9), "b": DIGITS.randint(0, 9)} for n in range(200)]


def question(row: dict) -> str:
    return f"What is {row['a']} + {row['b']}?" if row["environment"] == "add" else f"Look up key {row['a']}."


def answer(row: dict) -> str:
    return str(row["a"] + row["b"]) if row["environment"] == "add" else f"value {row['a']}"


class TrlAdd:
    """Adding with a tool, as a TRL environment."""

    def reset(self, **row):
        self.want, self.seen = str(row["a"] + row["b"]), None

    def add(self, a: int, b: int) -> str:
        """
        Add two numbers.

        Args:
            a: the first number
            b: the second number

        Returns:
            The sum.
        """
        self.seen = str(int(a) + int(b))
        return self.seen

    def get_reward(self) -> float:
        return float(self.seen == self.want)


class TrlLook:
    """Looking up a key with a tool, as a TRL environment."""

    def reset(self, **row):
        self.want, self.seen = f"value {row['a']}", None

    def look(self, key: str) -> str:
        """
        Look up a key.

        Args:
            key: the key to look up

        Returns:
            The value.
        """
        self.seen = f"value {key}"
        return self.seen

    def get_reward(self) -> float:
        return float(self.seen == self.want)


class ToolEnv(Env):
    """A TRL environment's tool and reward as one of ours."""

    turn_limits = {"micro": ROUNDS + 1}

    def _load(self):
        rows = [row for row in ROWS if row["environment"] == self.name]
        return [Instance(f"{self.name}-{n}", self.task, self.name, dict(row)) for n, row in enumerate(rows)]

    def _start(self, instance, rng):
        self.world = WORLDS[self.name]()
        self.world.reset(**instance.data)
        return [{"role": "user", "content": question(instance.data)}]

    def _call(self, call):
        try:
            return getattr(self.world, self.name)(**call.arguments)
        except (TypeError, ValueError) as error:
            return f"Error: {error}"

    def _no_call(self, parsed):
        self._finish(Status.COMPLETED, self.world.get_reward())
        return {"role": "user", "content": ""}


WORLDS = {"add": TrlAdd, "look": TrlLook}
# The tools as TRL describes them: the prompts are the same token by token.
ENVS = {name: type(f"{world.__name__}Env", (ToolEnv,), {"task": f"bench_{name}", "name": name,
                                                         "tools": [get_json_schema(getattr(world(), name))]})
        for name, world in WORLDS.items()}


def dialogue(chat: ChatFormat, row: dict) -> tuple[list[int], list[int]]:
    """Tokens and mask of a right dialogue."""
    name = row["environment"]
    arguments = {"a": row["a"], "b": row["b"]} if name == "add" else {"key": str(row["a"])}
    ids = chat.opening_ids([{"role": "user", "content": question(row)}], ENVS[name].tools)
    mask = [0] * len(ids)
    for text, after in ((render_turn(assistant_call(name, **arguments)), [{"role": "tool", "content": answer(row)}]),
                        (f"The answer is {answer(row)}." if name == "add" else f"It is {answer(row)}.", None)):
        turn = chat.turn_ids(text)
        ids, mask = ids + turn, mask + [1] * len(turn)
        if after:
            more = chat.continuation_ids(after, ended=True)
            ids, mask = ids + more, mask + [0] * len(more)
    return ids, mask


def teach(folder: str, template: str) -> None:
    """A model that has been taught the tool format, saved with its tokenizer and TRL's Qwen2.5 template."""
    rng = random.Random(0)
    words = ["".join(rng.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(rng.randint(2, 9))) for _ in range(2000)]
    texts = [" ".join(rng.choice(words) for _ in range(40)) for _ in range(1000)]
    texts += [f"{question(row)} The answer is {answer(row)}. It is {answer(row)}. You are a helpful assistant." for row in ROWS] * 2
    # A plain tokenizer, whose only additions are the tags: TRL cuts a conversation behind <|im_end|>, so no token may reach over it.
    with mock.patch.object(policy, "LAYOUT", ["<tool_call>", "</tool_call>"]):
        tokenizer = policy.train_micro_tokenizer(texts, (), 1536)
    tokenizer.chat_template = template
    chat = ChatFormat(tokenizer)
    rows = [dialogue(chat, row) for row in ROWS]
    model = build_micro_model(len(tokenizer), max_tokens=4096)
    for _ in imitate(model, iter(lambda: rng.sample(rows, 8), None), updates=150, lr=3e-3):
        pass
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


class Ours:
    """One training step's generation and update with the suite."""

    def __init__(self, folder: str, out: str) -> None:
        self.config = load_recipe("micro", method="grpo", out=out, **{"model.path": folder, "algorithm": {"kl_coef": 0.0}})
        model, tokenizer = load_policy(folder)
        self.chat, self.generator = ChatFormat(tokenizer), TransformersGenerator(model)
        self.learner = Learner(model, get_algorithm("grpo", kl_coef=0.0), self.config)
        self.envs = EnvPool(lambda task: ENVS[task.removeprefix("bench_")](size="micro"))

    def step(self, number: int) -> dict[str, float]:
        first = (number - 1) * PROMPTS // 2
        jobs = [Job(f"bench_{name}", first + prompt, f"{name}{prompt}", number * 1000 + prompt * 10 + member)
                for prompt in range(PROMPTS // 2) for name in ENVS for member in range(GROUP)]
        self.generator.sync(self.learner.model, number)
        started = time.perf_counter()
        played = run_jobs(jobs, self.envs, self.generator, self.chat, RolloutLimits(4096, MAX_TOKENS, ROUNDS + 1))
        generated = time.perf_counter()
        batch = to_batch(played, tuple(f"bench_{name}" for name in ENVS))
        self.learner.score(batch)
        batch.advantages_BT = self.learner.algorithm.advantages(batch)
        self.learner.update(batch, {})
        done = time.perf_counter()
        return {"sampled": sum(t.num_sampled_tokens for t in played), "tokens": sum(len(t.ids_T) for t in played),
                "generate_s": generated - started, "train_s": done - generated, "success": sum(t.success for t in played) / len(played)}


def trl_steps(folder: str, out: str, between) -> list[dict[str, float]]:
    """`between(step)` runs after every TRL step: the two sides alternate."""
    import datasets
    from transformers import AutoModelForCausalLM, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    datasets.disable_progress_bars()
    steps = []

    class Timed(GRPOTrainer):
        def _generate_and_score_completions(self, *args, **kwargs):
            started = time.perf_counter()
            output = super()._generate_and_score_completions(*args, **kwargs)
            mask = output["completion_mask"] if output.get("tool_mask") is None else output["tool_mask"] * output["completion_mask"]
            steps.append({"generate_s": time.perf_counter() - started, "sampled": int(mask.sum()),
                          "tokens": int(output["prompt_mask"].sum() + output["completion_mask"].sum()),
                          "success": sum(env.get_reward() for env in self.environments) / len(self.environments)})
            return output

    class Clock(TrainerCallback):
        def on_step_begin(self, *args, **kwargs):
            self.started = time.perf_counter()

        def on_step_end(self, args, state, control, **kwargs):
            steps[-1]["train_s"] = time.perf_counter() - self.started - steps[-1]["generate_s"]
            between(state.global_step)

    count = between.rounds
    rows = [{"prompt": [{"role": "user", "content": question(row)}], **row} for row in ROWS[:count * PROMPTS]]
    tokenizer = load_tokenizer(folder)                      # AutoTokenizer would cut the same text into other tokens
    tokenizer.padding_side = "left"
    config = GRPOConfig(output_dir=out, use_cpu=True, bf16=False, gradient_checkpointing=False, per_device_train_batch_size=PROMPTS * GROUP,
                        num_generations=GROUP, max_completion_length=(ROUNDS + 1) * MAX_TOKENS, max_tool_calling_iterations=ROUNDS,
                        max_steps=count, learning_rate=1e-6, beta=0.0, temperature=1.0, top_k=0, top_p=1.0, logging_steps=1,
                        report_to="none", save_strategy="no", disable_tqdm=True, shuffle_dataset=False, dataloader_pin_memory=False)
    Timed(model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), args=config, environment_factory=WORLDS,
          train_dataset=datasets.Dataset.from_list(rows), processing_class=tokenizer,
          callbacks=[Clock()]).train()
    return steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=4, help="steps of each side; the first is a warm-up")
    rounds = parser.parse_args().rounds
    import trl
    from trl.chat_template_utils import qwen2_5_chat_template

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        teach(f"{folder}/model", qwen2_5_chat_template)
        ours, mine = Ours(f"{folder}/model", f"{folder}/ours"), []

        def between(step: int) -> None:
            mine.append(ours.step(step))

        between.rounds = rounds
        theirs = trl_steps(f"{folder}/model", f"{folder}/trl", between)
    print(f"torch {torch.__version__}, trl {trl.__version__}, 1 thread, {rounds - 1} rounds after a warm-up, medians")
    print("| side | success | sampled tokens a step | tokens a step | generation, tokens/s | training, tokens/s |")
    print("| --- | --- | --- | --- | --- | --- |")
    figures = []
    for name, steps in (("TRL", theirs[1:]), ("this suite", mine[1:])):
        figures.append([median(s["sampled"] / s["generate_s"] for s in steps), median(s["tokens"] / s["train_s"] for s in steps)])
        print(f"| {name} | {median(s['success'] for s in steps):.2f} | {median(s['sampled'] for s in steps):.0f} | "
              f"{median(s['tokens'] for s in steps):.0f} | {figures[-1][0]:.0f} | {figures[-1][1]:.0f} |")
    print(f"| ratio | | | | {figures[1][0] / figures[0][0]:.1f} | {figures[1][1] / figures[0][1]:.2f} |")


if __name__ == "__main__":
    main()
