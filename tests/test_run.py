"""The notebook runner: strict parameters, the right kernel, failures kept, killed kernels and Ctrl-C survived."""

import ast
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import numpy as np
import psutil
import pytest
from nbformat.v4 import new_code_cell, new_notebook

from eppo.config import ROOT, load_recipe
from eppo.interrupts import exit_code

PARAMETERS = """from typing import Optional
seed: int = 0  # the seed
name: str = 'x'
lr: float = 0.1
quick: bool = False
steps: int = None
wide: Optional[int] = 3
flags: list[str] = []
numbers: list = [1]
overrides: dict = {}
plain = 2.5"""
BODY = """
import json, os, signal, subprocess, sys, time
from pathlib import Path
seen = [[seed, name, lr, quick, steps, flags, plain], sys.executable, os.environ.get("OMP_NUM_THREADS")]
Path(f"seen-{seed}.json").write_text(json.dumps(seen))
if name == "kill" and seed == 1:
    child = subprocess.Popen(["sleep", "600"])
    Path("child").write_text(str(child.pid))
    os.kill(os.getpid(), signal.SIGKILL)
if name == "wait":
    child = subprocess.Popen(["sleep", "600"])
    Path("child").write_text(str(child.pid))
    try:
        time.sleep(600)
    finally:
        Path("saved").touch()
if seed == 2:
    raise RuntimeError("as asked")
"""


def notebook(path, *cells, parameters=PARAMETERS):
    tagged = [new_code_cell(parameters, metadata={"tags": ["parameters"]})] if parameters else []
    metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    nbformat.write(new_notebook(cells=[*tagged, *map(new_code_cell, cells)], metadata=metadata), path)


@pytest.fixture
def tree(tmp_path):
    """A repository of its own: the runner, two notebooks, and eppo by path."""
    (tmp_path / "notebooks").mkdir()
    for name in ("run.py", "parameters.py", "execute.py"):
        shutil.copy(ROOT / "notebooks" / name, tmp_path / "notebooks")
    notebook(tmp_path / "notebooks" / "03_probe.ipynb", BODY, "after = 1")
    notebook(tmp_path / "notebooks" / "11_train.ipynb", "1", parameters="recipe: str = 'smoke'\nmethod: str = None\n"
             "seed: int = 1\nout: str = None\noverrides: dict = {}\nresume: bool = False")
    return tmp_path


@pytest.fixture
def runner(tree):
    """The runner of `tree` as a module."""
    before = list(sys.path)
    spec = importlib.util.spec_from_file_location("runner", tree / "notebooks" / "run.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["runner"] = module
    spec.loader.exec_module(module)
    yield module
    sys.path[:] = before
    del sys.modules["runner"], sys.modules["parameters"], sys.modules["execute"]


def start(tree, *arguments, **environment):
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | environment
    return subprocess.Popen([sys.executable, "notebooks/run.py", *arguments], cwd=tree, env=environment, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def gone(pid):
    """Whether the process ended (a zombie that nobody reaps in a container counts)."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.mark.parametrize("name, given, value", [
    ("seed", "3", 3), ("seed", np.int64(4), 4), ("seed", "007", 7), ("name", "007", "007"), ("name", Path("a/b"), "a/b"),
    ("name", "1e-6", "1e-6"), ("lr", "1e-6", 1e-6), ("lr", 1, 1.0), ("lr", np.float32(0.25), 0.25), ("quick", "true", True),
    ("quick", np.bool_(True), True), ("steps", None, None), ("steps", "None", None), ("wide", "null", None), ("wide", "4", 4),
    ("flags", ["a", "007"], ["a", "007"]), ("flags", "a", ["a"]), ("flags", "[db, 007]", ["db", "007"]),
    ("flags", ("a",), ["a"]),
    ("numbers", ["1", "1e-6", "x", "007", "true"], [1, 1e-6, "x", "007", True]), ("numbers", "[1, [2, a]]", [1, [2, "a"]]),
    ("overrides", "{rollout.lag: 2, optim.lr: 1e-6}", {"rollout.lag": 2, "optim.lr": 1e-6}),
    ("overrides", {"a": np.int64(1)}, {"a": 1}), ("plain", "3", 3.0),
])
def test_values_arrive_with_their_declared_type(runner, tree, name, given, value):
    found = runner.typed_parameters(tree / "notebooks/03_probe.ipynb", {name: given})[name]
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize("name, given, words", [
    ("seeed", "3", "unknown parameter of 03_probe.ipynb: 'seeed'; did you mean 'seed'"),
    ("seed", "1e3", "03_probe.ipynb: seed = '1e3' (str) does not fit its declared type int"),
    ("seed", 1.5, "does not fit its declared type int"), ("seed", True, "does not fit its declared type int"),
    ("seed", None, "does not fit its declared type int"), ("seed", ["1", "2"], "does not fit its declared type int"),
    ("lr", "fast", "lr = 'fast' (str) does not fit its declared type float"), ("lr", True, "declared type float"),
    ("quick", "1", "declared type bool"), ("name", 7, "declared type str"), ("flags", [1], "flags[0] = 1 (int) does not fit"),
    ("flags", "[a", "not a well-formed list"), ("overrides", "a", "declared type dict"),
])
def test_what_does_not_fit_is_refused(runner, tree, name, given, words):
    with pytest.raises(ValueError) as caught:
        runner.typed_parameters(tree / "notebooks/03_probe.ipynb", {name: given})
    assert words in str(caught.value)


@pytest.mark.parametrize("line, words", [
    ("a: int | None = 3", "cannot read parameter 'a'"), ("a = b = 3", "cannot read parameter"),
    ("a: int = 3 + 4", "default of parameter 'a' must be a literal"),
])
def test_a_parameter_that_papermill_would_lose_is_refused(runner, tree, line, words):
    notebook(tree / "notebooks/05_odd.ipynb", parameters=line)
    with pytest.raises(ValueError, match=words):
        runner.declared_parameters(tree / "notebooks/05_odd.ipynb")


def test_notebook_by_name(runner, tree):
    for name in ("probe", "03_probe", "03_probe.ipynb", "notebooks/03_probe.ipynb"):
        assert runner.find_notebook(name) == tree / "notebooks/03_probe.ipynb"
    with pytest.raises(ValueError, match="unknown notebook 'prob'; did you mean '03_probe'"):
        runner.find_notebook("prob")


def test_a_notebook_without_tags_takes_no_parameters(runner, tree):
    path = tree / "notebooks/06_bare.ipynb"
    notebook(path, "1", parameters="")
    assert runner.declared_parameters(path) == {}
    with pytest.raises(ValueError, match="unknown parameter of 06_bare.ipynb: 'seed'"):
        runner.plan(path, {"seed": 1})


def test_where_the_executed_copy_goes(runner, tree, tmp_path):
    train, probe = (runner.find_notebook(name) for name in ("train", "probe"))
    config = load_recipe("smoke", method="agentrl", seed=1, **{"rollout.lag": 2})   # seed 1 is the notebook's own default
    job = runner.plan(train, {"method": "agentrl", "overrides": "{rollout.lag: 2}"})
    assert (job.run_dir, job.identity) == (config.run_dir(), config.identity())
    assert job.output == config.run_dir() / "notebooks/11_train.ipynb"
    assert runner.plan(train, {"out": str(tmp_path / "o")}).output == tmp_path / "o/notebooks/11_train.ipynb"
    assert runner.plan(probe, {"seed": 3}).output == tree / "results/notebooks/03_probe-s3.ipynb"
    assert runner.plan(probe, {"seed": 3, "lr": 1}).output != runner.plan(probe, {"seed": 3, "lr": 2}).output
    with pytest.raises(ValueError, match="unknown key 'rollout.lagg'"):
        runner.plan(train, {"overrides": {"rollout.lagg": 2}})


def test_resume_looks_at_identity_status_and_checkpoints(runner, tree, tmp_path):
    def plan():
        return runner.plan(runner.find_notebook("train"), {"out": str(tmp_path / "o")}, resume=True)

    def record(status, identity, exception=None):
        job = plan()
        job.output.parent.mkdir(parents=True, exist_ok=True)
        (job.run_dir / "run.json").write_text(json.dumps({"status": status, "identity": identity}))
        about = {"parameters": job.parameters | {"resume": False}, "end_time": "now", "exception": exception}
        job.output.write_text(json.dumps({"metadata": {"papermill": about}}))
        return runner.is_finished(plan())

    job = plan()
    assert not runner.is_finished(job) and "resume" not in job.parameters
    assert record("finished", job.identity) is True
    assert record("stopped", job.identity) is False and record("finished", "other") is False
    assert record("finished", job.identity, exception=True) is False
    (tmp_path / "o/checkpoints").mkdir()
    (tmp_path / "o/checkpoints/step-000001-0123456789abcdef.pt").touch()
    assert plan().parameters["resume"] is True


def test_batch_with_a_killed_kernel_and_a_failure_then_resume(tree):
    """Three notebooks at once: one fine, one that kills its kernel, one that fails; a second call repeats only the last two."""
    spec = tree / "other/kernels/python3/kernel.json"
    spec.parent.mkdir(parents=True)
    spec.write_text(json.dumps({"argv": ["/bin/false"], "display_name": "another", "language": "python"}))
    arguments = "probe --seeds 0 1 2 --jobs 3 -p name kill -p lr 1e-6 -p flags a b".split()
    process = start(tree, *arguments, JUPYTER_PATH=str(tree / "other"))
    out, err = process.communicate(timeout=60)
    assert process.returncode == 1 and "done: 03_probe" in out and out.count("FAILED") == 2
    assert "RuntimeError: as asked" in err and "DeadKernelError: Kernel died" in err
    seen = json.loads((tree / "seen-0.json").read_text())
    assert seen == [[0, "kill", 1e-6, False, None, ["a", "b"], 2.5], sys.executable, "1"]
    assert gone(int((tree / "child").read_text()))
    copies = {seed: nbformat.read(next((tree / "results/notebooks").glob(f"*-s{seed}-*")), as_version=4) for seed in (0, 1, 2)}
    assert "Kernel died" in copies[1].cells[0].source and "Exception was encountered" in copies[2].cells[0].source
    assert [copies[seed].metadata.papermill.exception for seed in (0, 1, 2)] == [None, True, True]
    os.remove(tree / "seen-0.json")
    process = start(tree, *arguments, "--resume")
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 1 and "3 notebooks, 1 already finished" in out and not (tree / "seen-0.json").exists()


def test_ctrl_c_lets_the_cell_save_and_ends_every_child(tree):
    process = start(tree, "probe", "-p", "name", "wait", "--seeds", "4", "5")
    deadline = time.monotonic() + 30
    while not (tree / "child").exists() and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.05)
    children = [child.pid for child in psutil.Process(process.pid).children(recursive=True)]
    time.sleep(0.3)                                         # the cell is in its sleep
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=40)
    assert process.returncode == 130 and (tree / "saved").exists(), err
    assert "interrupted" in out and "--resume" in out and out.count("03_probe name=wait seed=") == 2
    assert len(children) >= 3 and all(gone(pid) for pid in [*children, int((tree / "child").read_text())])


def test_sweep_out_of_time_says_what_is_left(runner, tree, capsys):
    code = runner.main("sweep --recipe smoke --hours 0 -p methods agentrl eppo -p seeds 0 1".split())
    assert code == 0
    left = [line.strip() for line in capsys.readouterr().out.splitlines() if line.startswith("  ")]
    assert left == [f"11_train recipe=smoke method={method} seed={seed}" for seed in (0, 1) for method in ("agentrl", "eppo")]


@pytest.mark.parametrize("arguments, words", [
    (["prob"], "did you mean '03_probe'"), (["probe", "-p", "seeed", "3"], "did you mean 'seed'"),
    (["probe", "-p", "seed"], "-p seed needs a value"), (["probe", "-p", "seed", "1", "-p", "seed", "2"], "given twice"),
    (["probe", "--seeds", "1", "1"], "asked for twice"), (["probe", "--recipe", "micro"], "unknown parameter"),
    (["train", "--recipe", "micor"], "did you mean 'micro'"), (["train", "-p", "method", "epppo"], "did you mean 'eppo'"),
    (["sweep"], "needs --recipe"), (["probe", "--hours", "1"], "--hours is for a sweep"),
    (["probe", "--jobs", "0"], "at least 1"),
    (["sweep", "--recipe", "smoke", "-p", "methods", "epppo"], "did you mean 'eppo'"),
])
def test_bad_input_is_one_line_and_exit_2(runner, tree, capsys, arguments, words):
    assert runner.main(arguments) == 2
    error = capsys.readouterr().err
    assert words in error and error.startswith("error: ") and error.count("\n") == 1
    assert not (tree / "results").exists()


def test_a_recorded_run_is_refused_before_its_notebook_is_touched(runner, tmp_path):
    notebook_of = runner.find_notebook("train")
    (tmp_path / "o").mkdir()
    (tmp_path / "o" / "steps.jsonl").write_text('{"step": 0}\n')
    with pytest.raises(ValueError, match="already holds a run; --resume goes on"):
        runner.plan(notebook_of, {"out": str(tmp_path / "o")})
    assert runner.plan(notebook_of, {"out": str(tmp_path / "o")}, resume=True).run_dir == tmp_path / "o"


def test_an_output_folder_that_cannot_be_made_is_an_error_in_one_line(runner, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="file is a file"):
        runner.plan(runner.find_notebook("train"), {"out": str(tmp_path / "file")})
    monkeypatch.setattr(runner.os, "access", lambda path, mode: False)      # root may write everywhere
    with pytest.raises(ValueError, match="cannot be written"):
        runner.plan(runner.find_notebook("train"), {"out": str(tmp_path / "o")})


def test_a_recipe_key_given_as_a_parameter_is_told_where_it_belongs(runner):
    with pytest.raises(ValueError, match=r"""-p overrides '{"model.path": "/m"}'"""):
        runner.plan(runner.find_notebook("train"), {"model.path": "/m"})


# ---- start-up ------------------------------------------------------------------------------------------------------------
HEAVY = ("torch", "transformers", "papermill", "nbformat", "pandas", "numpy", "matplotlib")


@pytest.mark.parametrize("command, code, words", [
    (["notebooks/run.py", "--help"], 0, "notebooks at a time"), (["notebooks/run.py", "trian"], 2, "did you mean '11_train'"),
    (["notebooks/run.py", "train", "--recipe", "micor"], 2, "did you mean 'micro'"),
    (["notebooks/run.py", "train", "-p", "method", "epppo"], 2, "did you mean 'eppo'"),
    (["notebooks/run.py", "train", "-p", "tasks", "dbb"], 2, "did you mean 'db'"),
    (["-m", "eval", "--help"], 0, "run folders"), (["-m", "envs", "chek"], 2, "did you mean 'check'")])
def test_a_name_is_checked_without_anything_heavy(command, code, words):
    """Measured as what is imported, not in seconds: -X importtime lists every module."""
    done = subprocess.run([sys.executable, "-X", "importtime", *command], cwd=ROOT, capture_output=True, text=True)
    modules = {line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines() if line.startswith("import time:")}
    assert done.returncode == code and words in done.stdout + done.stderr
    assert "argparse" in modules or "envs" in modules
    assert not modules & set(HEAVY)


def test_parameters_are_those_that_papermill_reads(runner):
    papermill = pytest.importorskip("papermill")
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        declared, read = runner.declared_parameters(path), papermill.inspect_notebook(str(path))
        assert list(declared) == list(read)
        for name, (kind, default) in declared.items():
            assert read[name]["inferred_type_name"].replace(" ", "") in (kind, "None")
            assert ast.literal_eval(read[name]["default"]) == default


def test_the_first_line_says_which_recipe_and_where_it_is(runner, tree, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(runner, "run", lambda *arguments: ([], []))
    arguments = ["train", "-p", "out", str(tmp_path / "o")]
    recipe = os.path.relpath(ROOT / "notebooks/recipes/smoke.yaml")
    assert runner.main(arguments) == 0
    assert capsys.readouterr().out == f"recipe smoke: {recipe} (the notebook's default; --recipe takes another)\n"
    assert runner.main([*arguments, "--recipe", "smoke", "-p", "overrides", "{optim.lr: 0}"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"recipe smoke: {recipe}", "warning: optim.lr = 0: the weights stay those of the start (a control)."]


def wait_for(ready, process, seconds=60):
    deadline = time.monotonic() + seconds
    while not ready() and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.02)
    assert ready(), process.communicate()


def test_ctrl_c_while_parameters_are_checked(tree):
    """A plugin that takes its time stands for any import."""
    (tree / "slow.py").write_text("import time\nfrom pathlib import Path\nPath('here').touch()\ntime.sleep(60)\n")
    process = start(tree, "train", "-p", "overrides", '{"plugins": ["slow.py"]}')
    wait_for((tree / "here").exists, process)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=20)
    assert (process.returncode, out, err) == (130, "", "\ninterrupted while starting; nothing was begun\n")
    assert not (tree / "results").exists()


@pytest.mark.parametrize("moment", ["imports", "kernel"])
def test_ctrl_c_before_the_first_cell_ends_at_once(tree, moment):
    process = start(tree, "probe", "-p", "name", "wait")
    family = psutil.Process(process.pid)

    def reached():
        below = family.children(recursive=True)
        return any("ipykernel_launcher" in child.cmdline() for child in below) if moment == "kernel" else below

    wait_for(reached, process)
    children = family.children(recursive=True)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=20)              # less than INTERRUPT_S, the time that a running cell is given
    assert process.returncode == 130 and "Traceback" not in out + err
    assert "interrupted; no cell was begun yet" in out and "--resume goes on" in out
    assert all(gone(child.pid) for child in children) and not (tree / "seen-0.json").exists()


@pytest.mark.parametrize("module", ["eval", "envs"])
def test_ctrl_c_in_a_command_is_one_line(module, tmp_path):
    """At the moment when the module that does the work is imported."""
    code = ("import runpy, sys, os, signal\nfrom importlib.abc import MetaPathFinder\n"
            "class Finder(MetaPathFinder):\n    def find_spec(self, name, path, target=None):\n"
            "        if name in ('eval.figures', 'envs.commands.check'):\n            os.kill(os.getpid(), signal.SIGINT)\n"
            f"sys.meta_path.insert(0, Finder())\nsys.argv = ['x', *{['--out', str(tmp_path)] if module == 'eval' else ['check', 'db']}]\n"
            f"runpy.run_module('{module}', run_name='__main__', alter_sys=True)")
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 130 and done.stderr == "\ninterrupted while starting; nothing was begun\n"


def test_ctrl_c_in_the_middle_of_a_command_is_one_line(capsys):
    def interrupted():
        raise KeyboardInterrupt

    assert exit_code(interrupted) == 130 and capsys.readouterr().err == "\ninterrupted\n"
    assert exit_code(lambda: 3) == 3
