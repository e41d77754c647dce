"""Rows that were recorded and are not there any more: named on reading, in tables and reports, and never fatal."""

import json
import warnings

import pytest
import toy_env

from eppo.config import load_recipe
from eppo.records import RunWriter, read_run
from eppo.types import StepRecord
from eval.agentbench import evaluate
from eval.evaluations import read_evaluation
from eval.policies import OracleAgent
from eval.report import report
from eval.runs import shipped
from eval.tables import render

TASKS = ("db", "os")


def write_run(folder):
    """Three steps of 4 db and 2 os episodes, validations at 0, 2, 3 on two instances each, an evaluation of 3 instances by 2 seeds."""
    with RunWriter(folder, load_recipe("smoke")) as writer:
        for step in range(4):
            validated = {f"val/{task}/{name}": value for task in TASKS for name, value in (("success", 0.5), ("faults", 0))}
            if step != 1:
                writer.write_eval(step, [row(task, "dev", seed=9 * index + step) for task in TASKS for index in range(2)])
            episodes = [{"task": task, "success": True} for task, count in zip(TASKS, (4, 2)) for _ in range(count)]
            counts = {"task/db/episodes": 4, "task/os/episodes": 2, "task/db/clip_frac": 0.1}
            writer.write_step(StepRecord(step, (validated if step != 1 else {}) | (counts if step else {})), episodes if step else [])
        writer.write_eval(3, [row(task, "test", seed, index=index) for seed in (0, 1) for task in TASKS for index in range(3)])
    return folder


def row(task, split, seed, **more):
    return {"task": task, "split": split, "seed": seed, "instance": f"{task}-{more.get('index', seed)}", "success": True,
            "status": "completed", "rules": "strict", "temperature": 1.0} | more


def delete(path, *numbers):
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(line for number, line in enumerate(lines) if number not in numbers))


def read(folder):
    """The run's gaps, each of which is also a warning."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run = read_run(folder)
    assert [str(one.message) for one in caught] == [f"{folder}/{text}" for text in run.gaps]
    return run.gaps


def test_whole_records_have_no_gaps(tmp_path):
    assert read(write_run(tmp_path)) == []
    assert [read_run(folder).gaps for folder in shipped()] == [[], []]


@pytest.mark.parametrize("file, numbers, expected", [
    ("episodes", [0], "episodes.jsonl: step 1 has 3 of 4 db episodes"),
    ("episodes", [6, 10, 11], "episodes.jsonl: step 2 has 3 of 4 db, 0 of 2 os episodes"),
    ("episodes", [17], "episodes.jsonl: step 3 has 1 of 2 os episodes"),
    ("eval", [4, 5], "eval.jsonl: step 2 has 0 of 2 db episodes"),
    ("eval", [12], "eval.jsonl: seed 0 of the evaluation of step 3 has 2 of 3 db episodes"),
    ("eval", [23], "eval.jsonl: seed 1 of the evaluation of step 3 has 2 of 3 os episodes")])
def test_deleted_rows_of_a_run_are_named(tmp_path, file, numbers, expected):
    write_run(tmp_path)
    delete(tmp_path / f"{file}.jsonl", *numbers)
    assert read(tmp_path) == [expected]
    if file == "eval":
        table = render("quickstart", [tmp_path], tmp_path / "t")
        assert len(table) and f"{tmp_path.name}, {expected}." in (tmp_path / "t/table_quickstart.md").read_text()


def test_the_first_instance_missing_under_every_seed(tmp_path):
    """The rows' own index says so where no seed has them all."""
    write_run(tmp_path)
    delete(tmp_path / "eval.jsonl", 12, 18)
    assert read(tmp_path) == [f"eval.jsonl: seed {seed} of the evaluation of step 3 has 2 of 3 db episodes" for seed in (0, 1)]


def test_rows_twice_are_named_too_and_many_places_are_counted(tmp_path):
    write_run(tmp_path)
    path = tmp_path / "episodes.jsonl"
    path.write_text(path.read_text() + path.read_text().splitlines()[-1] + "\n")
    assert read(tmp_path) == ["episodes.jsonl: step 3 has 3 of 2 os episodes"]
    with RunWriter(tmp_path / "long", load_recipe("smoke")) as writer:
        for step in range(1, 9):
            writer.write_step(StepRecord(step, {"task/db/episodes": 2}), [{"task": "db"}])
    assert read(tmp_path / "long")[-2:] == ["episodes.jsonl: step 5 has 1 of 2 db episodes",
                                            "episodes.jsonl: and 3 more places where rows are missing"]


def test_rows_of_a_step_that_was_never_finished_are_no_gap(tmp_path):
    write_run(tmp_path)
    with (tmp_path / "episodes.jsonl").open("a") as file:
        file.write(json.dumps({"step": 4, "task": "db"}) + "\n")
    assert read(tmp_path) == []


@pytest.mark.parametrize("numbers, expected", [
    ([0], f"episodes.jsonl: seed 0 of the evaluation of step 0 has 2 of 3 {toy_env.TOY_TASKS[0]} episodes"),
    (range(0, 12, 2), None), ([2, 5, 8, 11], "episodes.jsonl: has 8 of 12 episodes")])      # the last: each task's last instance
def test_deleted_rows_of_an_evaluation_are_named_and_played_again(tmp_path, numbers, expected):
    def play():
        return evaluate(OracleAgent(), toy_env.TOY_TASKS, (0, 1), size="micro", instances=3, out=tmp_path)

    play()
    path = tmp_path / "episodes.jsonl"
    ordered = sorted(map(json.loads, path.read_text().splitlines()), key=lambda row: (row["seed"], row["task"], row["index"]))
    path.write_text("".join(json.dumps(row) + "\n" for row in ordered))
    delete(path, *numbers)
    with pytest.warns(UserWarning, match="the command that made it plays what is missing"):
        evaluation = read_evaluation(tmp_path)
    assert evaluation.gaps and (expected is None or evaluation.gaps == [expected])
    assert any(note.startswith("Missing: episodes.jsonl") for note in report(evaluation, None).notes)
    play()
    assert read_evaluation(tmp_path).gaps == [] and len(read_evaluation(tmp_path).eval) == 12


def test_an_evaluation_of_nothing_is_refused():
    with pytest.raises(ValueError, match="instances = 0 would play nothing"):
        evaluate(OracleAgent(), toy_env.TOY_TASKS, (0,), size="micro", instances=0)
