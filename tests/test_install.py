"""One list of dependencies, and commands that do what README.md says."""

import ast
import os
import re
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, packages_distributions, requires, version
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
CORE = [Requirement(line) for line in PROJECT["project"]["dependencies"]]
EXTRAS = {extra: [Requirement(line) for line in lines]
          for extra, lines in PROJECT["project"]["optional-dependencies"].items()}


def make(*arguments, cwd=ROOT, **environment):
    """The commands that make would run, without running them."""
    done = run_make("--dry-run", *arguments, cwd=cwd, **environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def run_make(*arguments, cwd, **environment):
    ours = ("TORCH", "TORCH_INDEX", "PYTHON", "MAKEFLAGS", "MAKELEVEL", "MFLAGS")
    clean = {name: value for name, value in os.environ.items() if name not in ours}
    return subprocess.run(["make", "--no-print-directory", "-f", str(ROOT / "Makefile"), *arguments], cwd=cwd,
                          env=clean | environment, capture_output=True, text=True)


@pytest.fixture
def bare(tmp_path):
    """A folder with no environment yet."""
    (tmp_path / "pyproject.toml").write_text("")
    return tmp_path


def test_core_needs_neither_vllm_nor_compiler_nor_exact_torch():
    names = {requirement.name.lower() for requirement in CORE}
    assert not names & {"vllm", "trl", "textworld", "alfworld", "jericho", "lm-eval", "scipy"}
    torch = next(requirement for requirement in CORE if requirement.name == "torch")
    assert {specifier.operator for specifier in torch.specifier} == {">="}
    assert all("==" not in str(requirement.specifier) for extra in EXTRAS.values() for requirement in extra)


def test_extras_have_the_documented_names():
    assert {"notebooks", "eval", "gpu", "alfworld", "mysql", "dev"} <= set(EXTRAS)
    assert [requirement.name for requirement in EXTRAS["gpu"]] == ["vllm"]


def test_what_is_installed_satisfies_the_list():
    for requirement in CORE + EXTRAS["notebooks"] + EXTRAS["eval"] + EXTRAS["dev"]:
        if requirement.marker is None or requirement.marker.evaluate():
            installed = version(requirement.name)           # PackageNotFoundError names what is missing
            assert requirement.specifier.contains(installed, prereleases=True), f"{requirement}: {installed} is installed"


def test_every_third_party_import_is_declared():
    """What the three packages import at their top level comes with the core, or with the extra of the file's own part."""
    owners = packages_distributions()
    declared = {requirement.name.lower().replace("_", "-") for requirement in CORE}
    notebooks = declared | {requirement.name.lower() for requirement in EXTRAS["notebooks"]}
    for path in sorted(path for package in ("eppo", "envs", "eval") for path in (ROOT / package).rglob("*.py")):
        for node in ast.parse(path.read_text()).body:
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else \
                [node.module] if isinstance(node, ast.ImportFrom) and node.level == 0 else []
            for top in {module.split(".")[0] for module in modules} - {"eppo", "envs", "eval"} - set(sys.stdlib_module_names):
                found = {owner.lower().replace("_", "-") for owner in owners.get(top, [top])}
                assert found & (notebooks if path.is_relative_to(ROOT / "eval") else declared), f"{path}: {top} is not declared"


def test_environment_yml_installs_the_same_list(bare):
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    assert environment["channels"] == ["conda-forge", "nodefaults"]
    conda = [entry for entry in environment["dependencies"] if isinstance(entry, str)]
    [pip] = [entry["pip"] for entry in environment["dependencies"] if isinstance(entry, dict)]
    assert [re.split("[=<>]", entry)[0] for entry in conda] == ["python", "pip"], "packages belong in pyproject.toml"
    pinned = next(entry for entry in conda if entry.startswith("python")).split("=")[-1]
    assert Requirement(f"python{PROJECT['project']['requires-python']}").specifier.contains(pinned)
    [line] = pip
    extras = re.fullmatch(r"-e \.\[([a-z,]+)\]", line).group(1).split(",")
    assert set(extras) <= set(EXTRAS) and {"notebooks", "eval"} <= set(extras)
    assert f"install -e '.[{','.join(extras)}]'" in make("test", cwd=bare), "conda and make test give the same environment"


def test_metadata_of_the_installed_project_is_that_of_pyproject():
    try:
        lines = requires("eppo")
    except PackageNotFoundError:
        pytest.skip("the project is not installed here (make installs it)")
    installed = {Requirement(line).name.lower() for line in lines}
    assert installed == {requirement.name.lower() for group in (CORE, *EXTRAS.values()) for requirement in group}


def test_make_test_builds_everything_from_a_bare_folder(bare):
    commands = make("test", cwd=bare)
    order = [commands.index(part) for part in ("-m venv", "install  'torch'", "install -e '.[notebooks,eval,dev]'", "-m pytest")]
    assert order == sorted(order)


def test_make_reproduce_runs_the_quickstart(bare):
    commands = make("reproduce", cwd=bare)
    assert "install -e '.[notebooks]'" in commands
    assert commands.rstrip().endswith(".venv/bin/python notebooks/run.py quickstart --recipe micro")


def test_torch_is_chosen_by_variable_or_environment(bare):
    index = "https://download.pytorch.org/whl/cpu"
    assert f"install --index-url {index} 'torch'" in make(f"TORCH_INDEX={index}", cwd=bare)
    assert "install  'torch==2.13.0'" in make("TORCH=torch==2.13.0", cwd=bare)
    assert "install  'torch==2.13.0'" in make("test", cwd=bare, TORCH="torch==2.13.0")
    assert "3 GB" in make(cwd=bare), "the size is said before a large download"


def test_nothing_is_installed_twice(bare):
    """With the stamps newer than pyproject.toml only the tests run; a changed pyproject.toml or torch installs again."""
    commands = make("test", cwd=bare)
    (bare / ".venv").mkdir()
    for stamp in [".created", re.search(r"\.venv/(\.torch-\d+)", commands).group(1), ".notebooks", ".dev"]:
        (bare / ".venv" / stamp).touch()
    assert make("test", cwd=bare).strip() == ".venv/bin/python -m pytest"
    assert "install" not in make("reproduce", cwd=bare)
    assert "install  'torch==2.12.0'" in make("test", "TORCH=torch==2.12.0", cwd=bare)
    os.utime(bare / "pyproject.toml", (4e9, 4e9))
    assert "install -e '.[notebooks,eval,dev]'" in make("test", cwd=bare)


@pytest.fixture
def interpreter(bare):
    """A stand-in for Python that logs its calls in `calls`, has torch if NO_TORCH is 0, and whose pytest exits with TESTS."""
    path = bare / "python"
    path.write_text('#!/bin/sh\necho "$*" >> calls\ncase "$*" in\n'
                    '*find_spec*) exit $NO_TORCH;;\n"-m venv"*) mkdir -p .venv/bin; cp "$0" .venv/bin/python;;\n'
                    '"-m pytest"*) exit $TESTS;;\nesac\n')
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(("no_torch", "venv", "said"), [("0", "-m venv --system-site-packages .venv", "keeping the installed"),
                                                        ("1", "-m venv .venv", "about 3 GB")])
def test_a_torch_that_the_interpreter_has_is_used(bare, interpreter, no_torch, venv, said):
    done = run_make("test", f"PYTHON={interpreter}", cwd=bare, NO_TORCH=no_torch, TESTS="0")
    assert done.returncode == 0 and said in done.stdout
    assert venv in (bare / "calls").read_text().splitlines()
    (bare / "calls").unlink()
    assert run_make("test", f"PYTHON={interpreter}", cwd=bare, NO_TORCH=no_torch, TESTS="0").returncode == 0
    assert (bare / "calls").read_text().splitlines() == ["-m pytest"]


@pytest.mark.parametrize("code", ["1", "5"])
def test_failing_tests_and_no_tests_fail_make(bare, interpreter, code):
    """5 is what pytest exits with when it collected nothing."""
    assert run_make("test", f"PYTHON={interpreter}", cwd=bare, NO_TORCH="1", TESTS=code).returncode != 0


def test_old_python_gets_a_clear_message(bare):
    old = bare / "python3.9"
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)
    done = run_make(f"PYTHON={old}", cwd=bare)
    assert done.returncode != 0 and "older than Python 3.11" in done.stdout and not (bare / ".venv").exists()


def test_ci_script_runs_make_test_and_masks_nothing():
    script = (ROOT / ".ci" / "run").read_text()
    assert os.access(ROOT / ".ci" / "run", os.X_OK) and "set -euo pipefail" in script
    assert script.rstrip().endswith("make test </dev/null") and "||" not in script
    assert not re.search(r"^\t@?-", (ROOT / "Makefile").read_text(), re.M)
