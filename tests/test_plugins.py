"""Methods and environments from the user's own files: from one recipe key to a trained, resumed and evaluated run."""

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from models import tiny_model, tiny_tokenizer

import envs
from eppo.algorithms import ALGORITHMS, get_algorithm
from eppo.config import RunConfig, load_recipe
from eppo.records import read_run
from eppo.trainer import train
from envs.__main__ import main as envs_command

ROOT = Path(__file__).resolve().parent.parent
METHOD = '''"""A method outside the packages."""
from dataclasses import dataclass

from eppo.algorithms import Algorithm, register


@dataclass(kw_only=True, eq=False)
class Mine(Algorithm):
    width: float = 0.05

    def pace(self, stats):
        self.observe(stats)
        return dict.fromkeys(stats, self.width)


register("{name}", Mine)
'''
TINY = {"rollout.prompts_per_task": 1, "rollout.group_size": 2, "rollout.max_tokens": 160, "rollout.max_turn_tokens": 24,
        "validation.instances": 1, "validate_every": 1}


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A folder with a method of its own and tests/toy_env.py under ids of its own; what they register goes again."""
    monkeypatch.setattr("eppo.algorithms.ALGORITHMS", dict(ALGORITHMS))
    monkeypatch.setattr("envs._CLASSES", dict(envs._CLASSES))
    before = set(sys.modules)
    (tmp_path / "my_method.py").write_text(METHOD.format(name="mine"))
    (tmp_path / "my_env.py").write_text((ROOT / "tests/toy_env.py").read_text().replace("toy_", "own_"))
    yield tmp_path
    for name in set(sys.modules) - before:
        if name.startswith("plugin_"):
            del sys.modules[name]


def plugins(folder):
    return [str(folder / "my_method.py"), str(folder / "my_env.py")]


# ---- the key --------------------------------------------------------------------------------------------------------------
def test_a_recipe_names_files_beside_it(own, monkeypatch):
    monkeypatch.chdir("/")
    (own / "r.yaml").write_text("inherits: micro\nplugins: [my_method.py, my_env.py]\nmethod: mine\ntasks: [own_coin, own_dice]\n"
                                "method_settings: {mine: {width: 0.1}}")
    config = load_recipe(own / "r.yaml")
    assert config.plugins == tuple(plugins(own)) and config.tasks == ("own_coin", "own_dice")
    assert get_algorithm(config.method, **config.algorithm).width == 0.1
    assert load_recipe(own / "r.yaml", plugins=None) == config and RunConfig.from_dict(config.to_dict()) == config


def test_an_override_is_from_the_working_directory_and_serves_the_recipe(own, monkeypatch):
    """The recipe names a method that only the override's file registers."""
    (own / "r.yaml").write_text("inherits: micro\nmethod: mine")
    with pytest.raises(ValueError, match="unknown method 'mine'"):
        load_recipe(own / "r.yaml")
    monkeypatch.chdir(own)
    assert load_recipe(own / "r.yaml", plugins=["my_method.py"]).plugins == (str(own / "my_method.py"),)


def test_a_module_by_name(own, monkeypatch):
    monkeypatch.syspath_prepend(own)
    (own / "its_method.py").write_text(METHOD.format(name="its"))
    assert load_recipe("micro", plugins=["its_method"], method="its").plugins == ("its_method",)
    del sys.modules["its_method"]


def test_plugins_leave_the_identity_alone(own):
    assert load_recipe("micro", plugins=plugins(own)).identity() == load_recipe("micro").identity()


@pytest.mark.parametrize("text, words", [
    (None, "plugins: there is no file {path}"),
    ("import nothing_here", "{path}, line 1: ModuleNotFoundError: No module named 'nothing_here'"),
    ("x = 1\n\nx / 0", "{path}, line 3: ZeroDivisionError: division by zero"), ("def f(:\n  pass", "{path}, line 1: SyntaxError:"),
    (METHOD.format(name="eppo"), "ValueError: method name 'eppo' is taken by EPPO"),
    ("raise ValueError('two\\nlines')", "ValueError: two lines"),
    ("from eppo.algorithms import register\nregister('x', int)", "TypeError: method 'x'")])
def test_what_cannot_be_imported_is_one_line(own, text, words):
    path = own / "bad.py"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError) as caught:
        load_recipe("micro", plugins=[path])
    assert words.format(path=path) in str(caught.value) and "\n" not in str(caught.value)
    assert not [name for name in sys.modules if name.startswith("plugin_bad")]


@pytest.mark.parametrize("given, words", [("my.py", "plugins = 'my.py' is text, must be a list"), ([3], "plugins\\[0\\] = 3"),
                                          (["no_such_module"], "there is no module 'no_such_module' here; install"),
                                          ([".mine"], "there is no module '.mine'")])
def test_bad_values(given, words):
    with pytest.raises(ValueError, match=words):
        load_recipe("micro", plugins=given)


def test_a_file_runs_once_also_where_a_notebook_imported_it_by_itself(own, monkeypatch):
    monkeypatch.syspath_prepend(own)
    (own / "counted.py").write_text(f"open({str(own / 'count')!r}, 'a').write('x')")
    for _ in range(2):
        load_recipe("micro", plugins=[own / "counted.py"])
    (own / "known.py").write_text(f"open({str(own / 'count')!r}, 'a').write('y')")
    import known  # noqa: F401
    load_recipe("micro", plugins=[own / "known.py"])
    assert (own / "count").read_text() == "xy"
    del sys.modules["known"]


def test_a_cell_that_is_run_again_replaces_its_class(own):
    """Both registries: the same module and name is the same thing, edited; another one is refused."""
    for _ in range(2):
        scope = {"__name__": "cell"}
        exec(METHOD.format(name="again"), scope)
        exec("import envs\nfrom envs.base import Env\nclass Again(Env): task = 'again'\nenvs.register('again', Again)", scope)
    assert get_algorithm("again").__class__ is scope["Mine"] and envs.env_class("again") is scope["Again"]
    with pytest.raises(ValueError, match="'again' is taken"):
        envs.register("again", envs.env_class("db"))


def test_a_configuration_brings_its_plugins_into_another_process(own):
    config = load_recipe("micro", method="mine", tasks=["own_coin"], plugins=plugins(own))
    code = "import pickle, sys, envs; c = pickle.load(sys.stdin.buffer); print(c.method, envs.env_class(c.tasks[0]).task)"
    done = subprocess.run([sys.executable, "-c", code], input=pickle.dumps(config), capture_output=True, cwd=ROOT)
    assert done.stdout == b"mine own_coin\n", done.stderr


def test_environment_commands_take_plugins(own, capsys):
    assert envs_command(["--plugin", str(own / "my_env.py"), "check", "own_lookup"]) == 0
    assert envs_command(["--plugin", str(own / "none.py"), "check", "own_lookup"]) == 2
    assert "there is no file" in capsys.readouterr().err


def test_a_warm_start_is_of_its_environments_source(own):
    from eppo.warm_start import cache_key

    config = load_recipe("smoke", tasks=["own_coin"], plugins=plugins(own))
    before = cache_key(config)
    (own / "my_env.py").write_text((own / "my_env.py").read_text() + "\n# edited\n")
    assert cache_key(config) != before
    method = cache_key(config)
    (own / "my_method.py").write_text(METHOD.format(name="mine") + "\n# edited\n")
    assert cache_key(config) == method                      # the policy's start has nothing to do with the method


# ---- end to end -------------------------------------------------------------------------------------------------------------
def test_training_resuming_and_evaluating_through_the_runner(own):
    """A step in this process, then another and an evaluation through the runner, from the folder of the files."""
    tiny_model(scale=1.5).save_pretrained(own / "start")
    tiny_tokenizer().save_pretrained(own / "start")
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}

    def run(*arguments):
        done = subprocess.run([sys.executable, str(ROOT / "notebooks/run.py"), *arguments], cwd=own, env=environment, capture_output=True,
                              text=True, timeout=200)
        assert done.returncode == 0, done.stdout + done.stderr

    chosen = ("--recipe", "micro", "-p", "plugins", '["my_method.py", "my_env.py"]', "-p", "tasks", "own_coin", "own_dice")
    changes = TINY | {"model.path": str(own / "start"), "algorithm.width": 0.1}
    first = train(load_recipe("micro", method="mine", tasks=["own_coin", "own_dice"], steps=2, out=str(own / "o"), plugins=plugins(own),
                              **changes))
    assert [next(first).step for _ in range(2)] == [0, 1]
    first.close()
    assert read_run(own / "o").info["warnings"] == []
    (own / "my_method.py").write_text(METHOD.format(name="mine") + "# edited\n")
    run("train", *chosen, "-p", "method", "mine", "-p", "steps", "2", "-p", "out", "o", "--resume", "-p", "overrides", json.dumps(changes))
    trained = read_run(own / "o")
    assert (trained.info["status"], trained.config.method, trained.config.plugins) == ("finished", "mine", tuple(plugins(own)))
    text, = trained.info["warnings"]
    assert text.startswith(f"{own / 'my_method.py'} has changed since the run began")
    assert list(trained.steps["step"]) == [0, 1, 2] and len(trained.info["resumed"]) == 1
    assert trained.steps["task/own_coin/hi"].iloc[-1] == pytest.approx(1.1)
    run("eval_agentbench", *chosen, "-p", "policy", str(own / "o"), "-p", "instances", "1", "-p", "out", "e", "--seeds", "0")
    assert {json.loads(line)["task"] for line in (own / "e/episodes.jsonl").read_text().splitlines()} == {"own_coin", "own_dice"}
