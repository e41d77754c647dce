"""The sections of a run's configuration, key by key; the whole is `eppo.config.RunConfig`.

A value under which nothing could be learned is refused where no run can want it, and a warning of the run (`RunConfig.warnings`)
where one can, as a control does.
"""

from __future__ import annotations

from dataclasses import dataclass

from eppo.strict import Section, Settings, key


@dataclass(frozen=True, kw_only=True)
class Model(Section):
    section = "model"
    path: str = key("micro", '"micro" (small, trained from nothing), a local folder or a hub id.')
    dtype: str = key("float32", "Number format of the weights.", choices=("float32", "bfloat16"))


@dataclass(frozen=True, kw_only=True)
class Environments(Section):
    section = "env"
    source: str = key("generated", "Where instances come from.", choices=("generated", "official"))
    size: str = key("small", "Size of generated instances.", choices=("micro", "small", "full"))
    rules: str = key("agentbench", "To the letter, or with known holes closed.", choices=("agentbench", "strict"))
    path: str | None = key(None, "Folder of the official files; null looks at EPPO_DATA.")
    extra: Settings = key(Settings(), "task -> folder of further training instances (python -m envs synthesise).")


@dataclass(frozen=True, kw_only=True)
class Rollout(Section):
    section = "rollout"
    generator: str = key("transformers", "What samples the tokens.", choices=("transformers", "vllm"))
    prompts_per_task: int = key(26, "Prompts of each task in a step (the paper: 128 over five tasks).", low=1)
    group_size: int = key(8, "Episodes of a prompt, G.", low=1)
    temperature: float = key(0.8, "Sampling temperature; log-probabilities and entropy are taken at it too.", low=1e-3)
    max_tokens: int = key(8192, "Tokens of a whole episode, prompt and observations included.", low=1)
    max_turn_tokens: int = key(1024, "Sampled tokens of one turn.", low=1)
    max_turns: int | None = key(None, "Turns of an episode; null is the environment's own limit.", low=1)
    concurrency: int = key(64, "Episodes decoded at once.", low=1)
    workers: int = key(8, "Threads that step environments.", low=1)
    lag: int = key(0, "The rollouts of step t come from the weights of step t - lag.", low=0)
    stale_share: float = key(0.25, "Probability that a turn is sampled by the stale pool.", low=0, high=1)
    stale_refresh: int = key(25, "Steps between two refreshes of the stale pool.", low=1)
    abnormal_reward: float | None = key(-0.2, "Training reward of an episode that did not complete; null: as it came.")

    def _check(self) -> None:
        if self.generator == "vllm":                        # refused, not ignored: a run must sample with what its record says
            raise ValueError("rollout.generator = 'vllm': training samples with transformers as yet; vLLM serves evaluation (backend vllm)")
        if self.max_turn_tokens > self.max_tokens:
            raise ValueError(f"rollout.max_turn_tokens = {self.max_turn_tokens} is more than rollout.max_tokens = "
                             f"{self.max_tokens}, the limit of the whole episode; lower the first or raise the second")


@dataclass(frozen=True, kw_only=True)
class Optim(Section):
    section = "optim"
    lr: float = key(1e-5, "Learning rate of AdamW.", low=0)
    weight_decay: float = key(0.0, "Weight decay of AdamW.", low=0)
    betas: tuple[float, float] = key((0.9, 0.999), "The two decay rates of AdamW.", low=0, high=1)
    grad_clip: float = key(1.0, "Largest gradient norm; larger gradients are scaled down to it.", low=1e-12)
    warmup_steps: int = key(0, "Optimiser steps over which the learning rate rises linearly.", low=0)
    minibatches: int = key(1, "Optimiser steps that one pass over a rollout batch is cut into.", low=1)
    epochs: int = key(1, "Passes over a rollout batch.", low=1)
    micro_batch_tokens: int = key(16384, "Padded tokens of one forward pass; changes memory, not the sum.", low=1)
    share_prefixes: bool = key(False, "Compute what a group's episodes have in common at their start once; changes speed, not the sum.")

    def _check(self) -> None:
        if max(self.betas) == 1:
            raise ValueError(f"optim.betas = {list(self.betas)} must be below 1: a decay of 1 never takes a gradient in")


@dataclass(frozen=True, kw_only=True)
class Validation(Section):
    section = "validation"
    instances: int = key(32, "Fixed dev instances of each task that a validation plays; 0 plays none.", low=0)
    temperature: float = key(0.8, "Sampling temperature of a validation; 0 is greedy.", low=0)


@dataclass(frozen=True, kw_only=True)
class WarmStart(Section):
    """Supervised imitation of noisy expert episodes that gives the micro model its start; unused for other models."""

    section = "warm_start"
    episodes: int = key(400, "Distinct expert episodes of a task.", low=1)
    batch_episodes: int = key(12, "Episodes of one update.", low=1)
    max_tokens_seen: int = key(3_000_000, "Tokens after which the warm start gives up.", low=1)
    lr: float = key(3e-3, "Highest learning rate.", low=0)
    noise: float | Settings = key(0.1, "Probability that an expert's turn is a mistake; a number or one a task.", low=0, high=1)
    share: Settings = key(Settings(), "Relative weight of a task in the batches; 1 where absent.", low=0)
    target_low: float = key(0.10, "Lowest sampled success at which a task counts as started.", low=0, high=1)
    target_high: float = key(0.70, "Highest sampled success that still leaves room to learn.", low=0, high=1)
    seed: int = key(0, "Seed of episodes, tokenizer, weights and order.", low=0)
    hidden: int = key(128, "Width of the micro model.", low=8)
    layers: int = key(4, "Layers of the micro model.", low=1)
    heads: int = key(4, "Attention heads of the micro model.", low=1)
    kv_heads: int = key(2, "Key and value heads of the micro model.", low=1)
    mlp: int = key(384, "Inner width of the micro model's MLP.", low=8)
    vocab: int = key(1536, "Largest vocabulary of the micro tokenizer, special tokens included.", low=260)

    def _check(self) -> None:
        if self.lr == 0:
            raise ValueError("warm_start.lr = 0: the warm start would learn nothing; 0.003 is usual")
        if self.target_low >= self.target_high:
            raise ValueError(f"warm_start.target_low = {self.target_low} must be below target_high = {self.target_high}")
        for part, whole in (("heads", "hidden"), ("kv_heads", "heads")):
            size, parts = getattr(self, whole), getattr(self, part)
            if size % parts:
                raise ValueError(f"warm_start.{part} = {parts} must divide warm_start.{whole} = {size}")
