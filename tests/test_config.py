"""Recipes and configurations: what is accepted, what is refused and in which words."""

import copy
import json
import pickle
from dataclasses import FrozenInstanceError, replace

import numpy as np
import pytest

from eppo.algorithms import ALGORITHMS, Algorithm, register
from eppo.config import RECIPES, ROOT, RunConfig, known_paths, load_recipe, read_recipe


def write(folder, name, text):
    (folder / f"{name}.yaml").write_text(text)
    return folder / f"{name}.yaml"


def test_micro_has_its_values():
    config = load_recipe("micro")
    assert (config.recipe, config.method, config.steps, config.seed) == ("micro", "eppo", 100, 0)
    assert config.tasks == ("alfworld", "db", "kg", "os", "webshop")
    assert (config.env.size, config.env.rules, config.rollout.lag, config.rollout.stale_share) == ("micro", "strict", 4, 0.25)
    assert (config.optim.lr, config.optim.betas, config.validation.instances) == (5e-4, (0.9, 0.999), 16)


def test_smoke_inherits_micro_and_changes_keys_one_by_one():
    micro, smoke = load_recipe("micro"), load_recipe("smoke")
    assert smoke.steps < micro.steps
    assert smoke.rollout.temperature == micro.rollout.temperature and smoke.rollout.lag != micro.rollout.lag


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_recipe_loads_and_round_trips(path):
    config = load_recipe(path.stem)
    again = RunConfig.from_dict(json.loads(json.dumps(config.to_dict())))
    assert config == load_recipe(path) == again == pickle.loads(pickle.dumps(config)) == copy.deepcopy(config)
    assert config.identity() == again.identity() and hash(config) == hash(again)


def test_overrides_short_and_dotted():
    config = load_recipe("micro", method="agentrl", seed=np.int64(3), steps=None, tasks=["os"], out="x",
                         **{"rollout.lag": 2, "optim.lr": 1, "warm_start.noise": {"db": 0.5}, "algorithm.kl_coef": 0.0})
    assert (config.method, config.seed, config.steps, config.tasks, config.out) == ("agentrl", 3, 100, ("os",), "x")
    assert config.rollout.lag == 2 and config.optim.lr == 1.0 and type(config.optim.lr) is float and type(config.seed) is int
    assert dict(config.warm_start.noise) == {"db": 0.5} and dict(config.algorithm) == {"kl_coef": 0.0}


@pytest.mark.parametrize("overrides, words", [
    ({"rollout.lagg": 2}, ["override of recipe 'micro'", "unknown key 'rollout.lagg'", "did you mean 'rollout.lag'"]),
    ({"lr": 1.0}, ["unknown key 'lr'", "did you mean 'optim.lr'"]),
    ({"rollot.lag": 1}, ["unknown key 'rollot'", "did you mean 'rollout'"]),
    ({"steps.lag": 1}, ["unknown key 'steps.lag'"]),
    ({"optim.lr": "1e-6"}, ["optim.lr = '1e-6' is text, must be a finite number", "write 1.0e-6", "YAML 1.1"]),
    ({"optim.lr": "2.5E6"}, ["write 2.5e+6"]),
    ({"optim.lr": True}, ["optim.lr = True is true or false, must be a finite number"]),
    ({"optim.lr": float("nan")}, ["optim.lr = nan", "finite"]),
    ({"optim.lr": -1}, ["optim.lr = -1.0 must be at least 0 (Learning rate of AdamW.)"]),
    ({"optim.betas": [0.9]}, ["optim.betas = [0.9] is a list, must be a list of 2"]),
    ({"optim.betas": [0.9, 2]}, ["optim.betas = 2.0 must be between 0 and 1"]),
    ({"steps": "100"}, ["steps = '100' is text, must be a whole number; write 100 without quotes"]),
    ({"steps": 1.5}, ["steps = 1.5", "must be a whole number"]),
    ({"steps": True}, ["steps = True is true or false"]),
    ({"tasks": "db"}, ["tasks = 'db' is text, must be a list; write [\"db\"]"]),
    ({"tasks": ["db", "webshp"]}, ["unknown task in tasks: 'webshp'", "did you mean 'webshop'"]),
    ({"tasks": ["db", "db"]}, ["each once"]),
    ({"tasks": []}, ["at least one task"]),
    ({"method": "epppo"}, ["unknown method 'epppo'", "did you mean 'eppo'"]),
    ({"algorithm.alfa": 0.1}, ["'alfa'", "did you mean 'alpha'"]),
    ({"env.rules": "stric"}, ["env.rules: 'stric'", "did you mean 'strict'"]),
    ({"rollout": 3}, ["rollout = 3", "must be a mapping"]),
    ({"rollout.max_turn_tokens": 1024}, ["rollout.max_turn_tokens = 1024 is more than rollout.max_tokens = 512"]),
    ({"warm_start.noise": {"dbb": 0.1}}, ["unknown task in warm_start.noise: 'dbb'"]),
    ({"warm_start.noise": {"db": 2}}, ["warm_start.noise.db = 2 must be between 0 and 1"]),
    ({"warm_start.kv_heads": 3}, ["warm_start.kv_heads = 3 must divide warm_start.heads = 4"]),
    ({"warm_start.target_low": 0.9}, ["must be below target_high"]),
    # nothing would be learned, and no run can want that
    ({"rollout.group_size": 1}, ["rollout.group_size = 1", "method 'eppo' compares an episode with the others", "give at least 2"]),
    ({"rollout.group_size": 1, "method": "rloo"}, ["method 'rloo' compares"]),
    ({"rollout.temperature": 0}, ["rollout.temperature = 0.0 must be at least 0.001"]),
    ({"optim.minibatches": 11}, ["optim.minibatches = 11 is more than the 10 groups of a step", "lower the first or raise the second"]),
    ({"optim.betas": [0.9, 1]}, ["optim.betas = [0.9, 1.0] must be below 1"]),
    ({"warm_start.lr": 0}, ["warm_start.lr = 0", "learn nothing"]),
])
def test_bad_overrides(overrides, words):
    with pytest.raises(ValueError) as caught:
        load_recipe("micro", **overrides)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("overrides, words", [
    ({"optim.lr": 0}, "optim.lr = 0: the weights stay those of the start"),
    ({"optim.warmup_steps": 100}, "optim.warmup_steps = 100, but the run has 100 optimiser steps"),
    ({"rollout.temperature": 0.05}, "rollout.temperature = 0.05: the episodes of a prompt will be nearly equal"),
    ({"rollout.max_turn_tokens": 7}, "rollout.max_turn_tokens = 7: hardly a tool call fits")])
def test_values_under_which_little_is_learned_are_a_warning(overrides, words):
    text, = load_recipe("micro", **overrides).warnings
    assert text.startswith(words)


@pytest.mark.parametrize("overrides", [{}, {"steps": 0}, {"validation.instances": 0}, {"validate_every": 0}, {"optim.minibatches": 10},
                                       {"optim.warmup_steps": 99}, {"steps": 0, "optim.warmup_steps": 9}])
def test_values_that_a_run_may_well_want_are_not(overrides):
    assert load_recipe("micro", **overrides).warnings == []


def test_a_method_with_a_baseline_of_its_own_takes_groups_of_one(monkeypatch):
    monkeypatch.setattr("eppo.algorithms.ALGORITHMS", dict(ALGORITHMS))
    register("absolute", type("Absolute", (Algorithm,), {"compares_group": False}))
    assert load_recipe("micro", method="absolute", **{"rollout.group_size": 1}).rollout.group_size == 1


@pytest.mark.parametrize("text, words", [
    ("optim: {lr: 1e-6}", ["optim.lr = '1e-6'", "write 1.0e-6"]),
    ("stepss: 3", ["unknown key 'stepss'", "did you mean 'steps'"]),
    ("steps: 3\nsteps: 4", ["'steps' appears twice", "line 2"]),
    ("steps: [3", ["not valid YAML"]),
    ("- steps", ["'key: value' lines, not a list"]),
    ("", ["'key: value' lines, not empty"]),
    ("rollout:", ["rollout = None is empty, must be a mapping"]),
    ("inherits: [a, b]", ["must be the name of one recipe"]),
    ("inherits: micr", ["unknown recipe 'micr'", "did you mean 'micro'"]),
    ("sweep: {method: [eppo]}", ["sweep", "methods, seeds"]),
    ("method_settings: {eppo: {alpha: x}}", ["alpha"]),
    ("method_settings: {epppo: {alpha: 0.1}}", ["unknown method 'epppo'"]),
])
def test_bad_files_name_the_file(tmp_path, text, words):
    path = write(tmp_path, "bad", text)
    with pytest.raises(ValueError) as caught:
        load_recipe(path)
    for word in [*words, *([str(path)] if "micr" not in text else [])]:
        assert word in str(caught.value)


def test_an_error_names_the_ancestor_that_holds_it(tmp_path):
    parent = write(tmp_path, "parent", "steps: many")
    with pytest.raises(ValueError, match="steps = 'many'") as caught:
        load_recipe(write(tmp_path, "child", "inherits: parent\nsteps: 3"))
    assert str(caught.value).startswith(str(parent))


def test_inheritance_chain_and_circle(tmp_path):
    write(tmp_path, "a", "inherits: micro\nrollout: {lag: 1}\nsteps: 5")
    path = write(tmp_path, "b", "inherits: a\nrollout: {group_size: 2}")
    config = load_recipe(path)
    assert (config.recipe, config.rollout.lag, config.rollout.group_size, config.steps) == ("b", 1, 2, 5)
    assert config.tasks == load_recipe("micro").tasks
    write(tmp_path, "a", "inherits: b")
    with pytest.raises(ValueError, match="goes in a circle: b <- a <- b"):
        load_recipe(path)


def test_unknown_recipe_and_missing_file(tmp_path):
    with pytest.raises(ValueError, match="unknown recipe 'micor'; did you mean 'micro'"):
        load_recipe("micor")
    with pytest.raises(ValueError, match="does not exist"):
        load_recipe(tmp_path / "none.yaml")


def test_method_settings_follow_the_method(tmp_path):
    path = write(tmp_path, "r", "inherits: micro\nmethod_settings: {eppo: {beta: 0.5, alpha: 0.3}}\nalgorithm: {kl_coef: 0.0}")
    assert dict(load_recipe(path).algorithm) == {"alpha": 0.3, "beta": 0.5, "kl_coef": 0.0}
    assert dict(load_recipe(path, method="agentrl").algorithm) == {"kl_coef": 0.0}
    assert dict(load_recipe(path, **{"algorithm.beta": 0.7}).algorithm)["beta"] == 0.7


def test_identity_covers_what_changes_results_and_nothing_else(tmp_path):
    config = load_recipe("micro")
    same = replace(config, out=str(tmp_path), threads=1, recipe="other", trajectories="all", checkpoint_every=7)
    assert same.identity() == config.identity() and config.differences(same) == []
    other = load_recipe("micro", **{"rollout.lag": 5})
    assert other.identity() != config.identity() and config.differences(other) == ["rollout.lag: 4 -> 5"]
    assert config.identity() == load_recipe("micro", **{"rollout.temperature": 1}).identity()
    assert config.run_dir() == ROOT / "results/runs/micro" / f"eppo-s0-{config.identity()[:8]}"
    assert same.run_dir() == tmp_path


def test_frozen_and_checked_on_replace():
    config = load_recipe("micro")
    with pytest.raises(FrozenInstanceError):
        config.seed = 1
    with pytest.raises(TypeError):
        config.algorithm["alpha"] = 1.0
    with pytest.raises(ValueError, match="seed = -1 must be at least 0"):
        replace(config, seed=-1)


def test_every_key_says_what_it_means():
    sections = [RunConfig, *(type(value) for value in vars(RunConfig()).values() if hasattr(value, "section"))]
    meanings = [item.metadata["meaning"] for cls in sections for item in cls.__dataclass_fields__.values() if item.metadata]
    assert len(meanings) == len([path for path in known_paths() if path not in {cls.section for cls in sections}])
    assert all(meaning.endswith(".") for meaning in meanings)


def test_read_recipe_keeps_the_sweep():
    assert read_recipe("micro")["sweep"]["methods"] == ["agentrl", "eppo"]


def test_a_sampler_that_training_does_not_have_is_refused():
    with pytest.raises(ValueError, match="rollout.generator = 'vllm': training samples with transformers"):
        load_recipe("micro", **{"rollout.generator": "vllm"})
