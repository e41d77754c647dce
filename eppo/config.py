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
from eppo.plugins import absolute_plugins, load_plugins
from eppo.sections import Environments, Model, Optim, Rollout, Validation, WarmStart
from eppo.strict import Section, Settings, build, did_you_mean, key, kind_of, leaves, thaw

ROOT = Path(__file__).resolve().parent.parent
RECIPES = ROOT / "notebooks" / "recipes"
RECIPE_KEYS = ("inherits", "method_settings", "sweep")      # keys of a recipe file that are not keys of a run
SWEEP_KEYS = ("methods", "seeds")
SHORT_KEYS = ("method", "seed", "steps", "tasks", "out", "plugins")    # overrides whose None means: what the recipe says
# Keys that leave the results alone. Plugins bring names; those that are used are method and tasks.
WITHOUT_EFFECT = ("recipe", "out", "threads", "trajectories", "checkpoint_every", "plugins")


@dataclass(frozen=True, kw_only=True)
class RunConfig(Section):
    """Everything that defines a run. Frozen, hashable, picklable; `dataclasses.replace` gives a checked variant."""

    recipe: str = key("", "Name of the recipe this came from; only a label.")
    method: str = key("eppo", "The algorithm, a name of eppo.algorithms.ALGORITHMS.")
    seed: int = key(0, "Seed of everything random in the run.", low=0)
    steps: int = key(700, "Rollout batches to train on.", low=0)
    tasks: tuple[str, ...] = key(("alfworld", "db", "kg", "os", "webshop"), "The environments, in this order.")
    plugins: tuple[str, ...] = key((), "Files (.py) or modules that register methods and environments, imported before names are checked.")
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
        load_plugins(self.plugins)
        if not self.tasks or len(set(self.tasks)) != len(self.tasks):
            raise ValueError(f"tasks = {list(self.tasks)} must name at least one task, each once")
        for names, path in ((self.tasks, "tasks"), (self.warm_start.share, "warm_start.share"),
                            (self.warm_start.noise, "warm_start.noise"), (self.env.extra, "env.extra")):
            _check_tasks(names if not isinstance(names, float) else (), path)
        self._check_method()
        groups = self.rollout.prompts_per_task * len(self.tasks)
        if self.optim.minibatches > groups:
            raise ValueError(f"optim.minibatches = {self.optim.minibatches} is more than the {groups} groups of a step "
                             "(rollout.prompts_per_task x tasks), which are not divided: lower the first or raise the second")

    def _check_method(self) -> None:
        """Only what needs its class imports the method, and torch with it: a wrong name is refused at once."""
        from eppo.algorithms import ALGORITHMS, get_algorithm

        check_name("method", self.method, tuple(ALGORITHMS))
        alone = self.rollout.group_size == 1
        if self.algorithm or alone:
            method = get_algorithm(self.method, **self.algorithm)
            if alone and method.compares_group:
                raise ValueError(f"rollout.group_size = 1: method {self.method!r} compares an episode with the others of its prompt, so "
                                 "that every advantage would be 0 and nothing learned; give at least 2")

    @property
    def warnings(self) -> list[str]:
        """What a reader of the run must know, as constant texts: values under which little or nothing is learned."""
        optim, rollout = self.optim, self.rollout
        updates, texts = self.steps * optim.minibatches * optim.epochs, []
        if optim.lr == 0:
            texts.append("optim.lr = 0: the weights stay those of the start (a control).")
        if self.steps and optim.warmup_steps >= updates:
            texts.append(f"optim.warmup_steps = {optim.warmup_steps}, but the run has {updates} optimiser steps: optim.lr is not reached.")
        if rollout.temperature < 0.1:
            texts.append(f"rollout.temperature = {rollout.temperature:g}: the episodes of a prompt will be nearly equal, and a group "
                         "without spread has advantage 0.")
        if rollout.max_turn_tokens < 8:
            texts.append(f"rollout.max_turn_tokens = {rollout.max_turn_tokens}: hardly a tool call fits, turns will be cut.")
        return texts

    def __setstate__(self, state: dict[str, Any]) -> None:
        """In another process the plugins are not imported yet."""
        load_plugins(state["plugins"])
        self.__dict__.update(state)

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
        values |= {"plugins": absolute_plugins(values["plugins"], path.parent)} if "plugins" in values else {}
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
        overrides: dotted keys (`**{"rollout.lag": 2}`) and top-level ones; None for one of SHORT_KEYS keeps what the recipe says.
            Plugins that are relative paths: in a recipe from its folder, here from the working directory.

    Raises:
        ValueError: no such recipe, a key that does not exist (with the nearest), a value that does not fit, or a plugin that
            cannot be imported.
    """
    if overrides.get("plugins") is not None:                # the recipe itself may name what they register
        overrides |= {"plugins": absolute_plugins(overrides["plugins"])}
        _load(overrides["plugins"])
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
        _load(values.get("plugins", ()))
        for method in own:
            RunConfig(method=method, algorithm=own[method])
        plain["algorithm"] = _merge(own.get(plain.get("method", "eppo"), {}), plain.get("algorithm", {}))
        return RunConfig.from_dict({"recipe": recipe} | plain)
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from None


def _load(plugins: Any) -> None:
    """Import plugins before the whole is checked; what is no list of texts is refused there."""
    if isinstance(plugins, (list, tuple)) and all(isinstance(name, str) for name in plugins):
        load_plugins(plugins)


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
