"""What a run is made of: `load_recipe("micro", method="eppo", seed=1, **{"rollout.lag": 2})` returns a frozen `RunConfig`.

A recipe is a YAML file in notebooks/recipes, or any path. Besides the keys of `RunConfig` it may hold three of its own:

    inherits: micro                                   # one parent recipe, whose keys this one changes
    method_settings: {eppo: {beta: 0.9}}              # what `algorithm` gets when that method is chosen
    sweep: {methods: [agentrl, eppo], seeds: [0, 1]}  # what `notebooks/run.py sweep` runs over

Everything is strict: an unknown key, a value of the wrong type or out of range is a ValueError that names the file (or the
override), the dotted key, the value, what is allowed and the nearest name. The defaults below are those of the paper (App. A.2)
or, where it is silent, of AgentRL's release.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from eppo.checks import check_name
from eppo.strict import Section, Settings, build, did_you_mean, key, kind_of, leaves, thaw

ROOT = Path(__file__).resolve().parent.parent
RECIPES = ROOT / "notebooks" / "recipes"
RECIPE_KEYS = ("inherits", "method_settings", "sweep")      # keys of a recipe file that are not keys of a run
SWEEP_KEYS = ("methods", "seeds")
SHORT_KEYS = ("method", "seed", "steps", "tasks", "out")    # overrides whose None means: what the recipe says
WITHOUT_EFFECT = ("recipe", "out", "threads", "trajectories", "checkpoint_every")   # keys that leave the results alone


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
        if self.target_low >= self.target_high:
            raise ValueError(f"warm_start.target_low = {self.target_low} must be below target_high = {self.target_high}")
        for part, whole in (("heads", "hidden"), ("kv_heads", "heads")):
            size, parts = getattr(self, whole), getattr(self, part)
            if size % parts:
                raise ValueError(f"warm_start.{part} = {parts} must divide warm_start.{whole} = {size}")


@dataclass(frozen=True, kw_only=True)
class RunConfig(Section):
    """Everything that defines a run. Frozen, hashable, picklable; `dataclasses.replace` gives a checked variant."""

    recipe: str = key("", "Name of the recipe this came from; only a label.")
    method: str = key("eppo", "The algorithm, a name of eppo.algorithms.ALGORITHMS.")
    seed: int = key(0, "Seed of everything random in the run.", low=0)
    steps: int = key(700, "Rollout batches to train on.", low=0)
    tasks: tuple[str, ...] = key(("alfworld", "db", "kg", "os", "webshop"), "The environments, in this order.")
    out: str | None = key(None, "Folder of the run; null is results/runs/<recipe>/<method>-s<seed>-<identity>.")
    checkpoint_every: int = key(20, "Steps between checkpoints.", low=1)
    validate_every: int = key(20, "Steps between validations; 0 is never.", low=0)
    threads: int | None = key(None, "Threads of torch; null leaves them as they are.", low=1)
    trajectories: str = key("sample", "Which trajectories are recorded token by token.", choices=("none", "sample", "all"))
    device: str = key("auto", "Where the model runs.", choices=("auto", "cpu", "cuda"))
    model: Model = Model()
    env: Environments = Environments()
    rollout: Rollout = Rollout()
    optim: Optim = Optim()
    algorithm: Settings = key(Settings(), "The method's own settings; what is absent has the method's default.")
    validation: Validation = Validation()
    warm_start: WarmStart = WarmStart()

    def _check(self) -> None:
        if not self.tasks or len(set(self.tasks)) != len(self.tasks):
            raise ValueError(f"tasks = {list(self.tasks)} must name at least one task, each once")
        for names, path in ((self.tasks, "tasks"), (self.warm_start.share, "warm_start.share"),
                            (self.warm_start.noise, "warm_start.noise")):
            _check_tasks(names if not isinstance(names, float) else (), path)
        from eppo.algorithms import get_algorithm

        get_algorithm(self.method, **self.algorithm)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types, every key present; `from_dict` gives the same configuration back."""
        return thaw(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "RunConfig":
        """The configuration of nested mappings; absent keys have their defaults. ValueError as for a recipe."""
        return build(cls, values, known=known_paths())

    def identity(self) -> str:
        """16 hexadecimal digits, the same exactly where every key that changes results is (see WITHOUT_EFFECT)."""
        values = {name: value for name, value in self.to_dict().items() if name not in WITHOUT_EFFECT}
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]

    def differences(self, other: "RunConfig") -> list[str]:
        """Each key that changes results and differs in `other`, as "key: mine -> its"; empty where `identity` is equal."""
        mine, theirs = leaves(self.to_dict()), leaves(other.to_dict())
        return [f"{path}: {mine.get(path)!r} -> {theirs.get(path)!r}" for path in sorted(mine | theirs)
                if mine.get(path) != theirs.get(path) and path not in WITHOUT_EFFECT]

    def run_dir(self) -> Path:
        """The folder of the run: `out`, or the default below results/runs."""
        name = f"{self.method}-s{self.seed}-{self.identity()[:8]}"
        return Path(self.out) if self.out else ROOT / "results" / "runs" / (self.recipe or "unnamed") / name


# ---- recipes --------------------------------------------------------------------------------------------------------
def recipe_path(name: str | os.PathLike[str], folder: Path | None = None) -> Path:
    """The file of a recipe: `name` as a path if it ends in .yaml, else a name in `folder` or in notebooks/recipes."""
    text = os.fspath(name)
    if text.endswith((".yaml", ".yml")):
        if (path := (folder or Path()) / text).is_file():
            return path
        raise ValueError(f"recipe file {path} does not exist; recipes by name: {', '.join(_recipe_names())}")
    for place in (folder, RECIPES):
        if place is not None and (path := place / f"{text}.yaml").is_file():
            return path
    raise ValueError(f"unknown recipe {text!r}{did_you_mean(text, _recipe_names())}; known: {', '.join(_recipe_names())}; "
                     "a path must end in .yaml")


def read_recipe(name: str | os.PathLike[str]) -> dict[str, Any]:
    """The keys of a recipe over those of the recipes it inherits from, checked but not resolved (with `sweep` and the like).

    Raises:
        ValueError: no such recipe, broken YAML, a circle of `inherits`, or a key or value that does not fit.
    """
    chain, parent = [recipe_path(name)], None
    while parent := (values := _read_yaml(chain[0])).get("inherits"):
        if not isinstance(parent, str):
            raise ValueError(f"{chain[0]}: inherits = {parent!r} must be the name of one recipe")
        path = recipe_path(parent, chain[0].parent)
        if path.resolve() in [known.resolve() for known in chain]:
            raise ValueError(f"{chain[0]}: inherits goes in a circle: {' <- '.join(part.stem for part in [path, *chain])}")
        chain.insert(0, path)
    merged: dict[str, Any] = {}
    for path in chain:
        values = _read_yaml(path)
        for part, inside in (("method_settings", None), ("sweep", SWEEP_KEYS)):
            if not isinstance(own := values.get(part, {}), dict) or not set(own) <= set(own if inside is None else inside):
                raise ValueError(f"{path}: {part} = {own!r} must be a mapping" + (f" of {', '.join(inside)}" if inside else ""))
        merged = _merge(merged, values)
        _resolve(merged, path.stem, str(path))
    return merged


def load_recipe(name_or_path: str | os.PathLike[str], **overrides: Any) -> RunConfig:
    """The configuration of a recipe with some keys changed.

    Args:
        name_or_path: "micro" for notebooks/recipes/micro.yaml, or a path that ends in .yaml.
        overrides: dotted keys (`**{"rollout.lag": 2}`) and top-level ones; None for method, seed, steps, tasks or out keeps
            what the recipe says.

    Raises:
        ValueError: no such recipe, a key that does not exist (with the nearest), or a value that does not fit.
    """
    values = read_recipe(name_or_path)
    changed = {path: value for path, value in overrides.items() if not (value is None and path in SHORT_KEYS)}
    for path, value in changed.items():
        *sections, last = path.split(".")
        place = values
        for part in sections:
            place = place.setdefault(part, {})
            if not isinstance(place, dict):
                raise ValueError(f"override: unknown key {path!r}{did_you_mean(path, known_paths())}")
        place[last] = thaw(value)
    stem = recipe_path(name_or_path).stem
    return _resolve(values, stem, f"override of recipe {stem!r}" if changed else stem)


def _resolve(values: Mapping[str, Any], recipe: str, source: str) -> RunConfig:
    """The configuration of merged recipe keys; an error starts with `source`."""
    plain = {name: value for name, value in values.items() if name not in RECIPE_KEYS}
    own = values.get("method_settings", {})
    try:
        for method in own:
            RunConfig(method=method, algorithm=own[method])
        plain["algorithm"] = _merge(own.get(plain.get("method", "eppo"), {}), plain.get("algorithm", {}))
        return RunConfig.from_dict({"recipe": recipe} | plain)
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from None


class _StrictLoader(yaml.SafeLoader):
    """YAML without repeated keys, of which PyYAML silently keeps the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = []
        for name_node, _ in node.value:
            if (name := self.construct_object(name_node, deep=True)) in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {name!r} appears twice", name_node.start_mark)
            seen.append(name)
        return super().construct_mapping(node, deep)


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        values = yaml.load(path.read_text(encoding="utf-8"), _StrictLoader)
    except yaml.MarkedYAMLError as error:
        raise ValueError(f"{path}, line {error.problem_mark.line + 1}: not valid YAML: {error.problem}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid YAML: {error}") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path} must hold 'key: value' lines, not {kind_of(values)}")
    return values


def _merge(base: Mapping[str, Any], top: Mapping[str, Any]) -> dict[str, Any]:
    """`top` over `base`, mappings key by key."""
    both = {name for name in top if isinstance(top[name], Mapping) and isinstance(base.get(name), Mapping)}
    return {**base, **{name: _merge(base[name], value) if name in both else value for name, value in top.items()}}


def _recipe_names() -> list[str]:
    return sorted(path.stem for path in RECIPES.glob("*.yaml"))


def _check_tasks(names: Iterable[str], path: str) -> None:
    from envs import known_tasks

    for name in names:
        check_name(f"task in {path}:", name, known_tasks())


@cache
def known_paths() -> tuple[str, ...]:
    """Every key of a run as a dotted path, sections by themselves too."""
    defaults = {item.name: thaw(item.default) for item in fields(RunConfig)}
    return tuple({**leaves(defaults), **defaults})
