"""Records: what is written comes back, equal runs give equal bytes, and damage is found, named and survived."""

import errno
import json
import math
import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from eppo import files
from eppo.config import load_recipe
from eppo.files import LineFile, encode, read_lines, write_atomically
from eppo.records import RunWriter, compare_steps, list_runs, read_run
from eppo.types import StepRecord

CONFIG = load_recipe("smoke")


def write_run(folder, steps, **changes):
    with RunWriter(folder, CONFIG) as writer:
        for step in range(1, steps + 1):
            metrics = {"loss/total": 1 / step, "task/db/entropy": math.nan, "perf/step_s": 0.5} | changes
            writer.write_step(StepRecord(step, metrics),
                              episodes=[{"task": "db", "success": True, "reward": math.nan}, {"task": "os", "success": False}],
                              trajectories=[{"ids": [1, 2], "mask": [0, 1]}])
        writer.write_eval(steps, [{"task": "db", "score": None, "reward": 1.0}])


def test_round_trip(tmp_path):
    write_run(tmp_path, 3)
    run = read_run(tmp_path)
    assert run.info["status"] == "finished" and run.info["error"] is None and run.info["schema"] == 1
    assert run.config == CONFIG and run.info["identity"] == CONFIG.identity() and run.info["seed"] == CONFIG.seed
    assert run.info["versions"]["python"].startswith("3.") and run.info["versions"]["torch"].startswith(torch.__version__[:4])
    assert run.info["hardware"]["cores"] >= 1 and set(run.info) >= {"commit", "dirty", "started", "ended"}
    assert run.steps["step"].tolist() == [1, 2, 3] and run.steps["loss/total"].tolist() == [1.0, 0.5, 1 / 3]
    assert run.steps["task/db/entropy"].isna().all() and run.steps["task/db/entropy"].dtype == float
    assert list(run.steps) == ["step", "loss/total", "perf/step_s", "task/db/entropy"]
    assert run.episodes.shape == (6, 4) and run.episodes["task"].tolist() == ["db", "os"] * 3
    assert run.eval[["step", "reward"]].values.tolist() == [[3, 1.0]]


def test_lines_are_sorted_ascii_and_exact(tmp_path):
    write_run(tmp_path, 1)
    assert (tmp_path / "steps.jsonl").read_bytes() == \
        b'{"loss/total":1.0,"perf/step_s":0.5,"step":1,"task/db/entropy":null}\n'
    row = {"b": np.float32(0.1), "a": torch.tensor(3), "t": "\u00e9\u2028\ud800\n", "n": np.array([1, 2]), "f": np.bool_(True),
           "x": 0.1}
    line = encode(row)
    assert line == b'{"a":3,"b":0.10000000149011612,"f":true,"n":[1,2],"t":"\\u00e9\\u2028\\ud800\\n","x":0.1}\n'
    assert json.loads(line)["t"] == row["t"]


@pytest.mark.parametrize("metrics, words", [
    ({"loss/total": math.inf}, "steps: loss/total is inf; infinity is not recorded"),
    ({"loss/total": torch.tensor(-math.inf)}, "steps: loss/total is -inf"),
    ({"loss/total": object()}, "cannot be recorded"),
])
def test_what_is_no_number_is_refused_and_nothing_is_written(tmp_path, metrics, words):
    with RunWriter(tmp_path, CONFIG) as writer:
        with pytest.raises(ValueError, match=words):
            writer.write_step(StepRecord(1, metrics), episodes=[{"task": "db"}])
        assert writer.last_step is None
    assert all((tmp_path / f"{name}.jsonl").read_bytes() == b"" for name in ("steps", "episodes", "trajectories"))


def test_steps_go_forward_only(tmp_path):
    with RunWriter(tmp_path, CONFIG) as writer:
        writer.write_step(StepRecord(2, {}))
        with pytest.raises(ValueError, match="step 2 comes after step 2"):
            writer.write_step(StepRecord(2, {}))


@pytest.mark.parametrize("error, status, text", [
    (KeyboardInterrupt(), "stopped", None), (GeneratorExit(), "stopped", None),
    (FloatingPointError("loss is nan"), "failed", "FloatingPointError: loss is nan"),
])
def test_how_a_run_ended(tmp_path, error, status, text):
    with pytest.raises(type(error)), RunWriter(tmp_path, CONFIG) as writer:
        writer.write_step(StepRecord(1, {"loss/total": 1.0}))
        raise error
    run = read_run(tmp_path)
    assert (run.info["status"], run.info["error"], len(run.steps)) == (status, text, 1)


def test_resume_rewinds_and_continues_to_the_same_bytes(tmp_path):
    write_run(tmp_path / "whole", 4)
    write_run(tmp_path / "part", 3)
    with RunWriter(tmp_path / "part", CONFIG, resume=True) as writer:
        writer.rewind(2)
        assert writer.last_step == 2
        for step in (3, 4):
            writer.write_step(StepRecord(step, {"loss/total": 1 / step, "task/db/entropy": math.nan, "perf/step_s": 9.0}),
                              episodes=[{"task": "db", "success": True, "reward": math.nan}, {"task": "os", "success": False}],
                              trajectories=[{"ids": [1, 2], "mask": [0, 1]}])
    assert compare_steps(tmp_path / "whole", tmp_path / "part") == []
    for name in ("episodes", "trajectories"):
        assert (tmp_path / "whole" / f"{name}.jsonl").read_bytes() == (tmp_path / "part" / f"{name}.jsonl").read_bytes()
    assert (tmp_path / "part" / "eval.jsonl").read_bytes() == b""           # it was of step 3
    assert len(read_run(tmp_path / "part").info["resumed"]) == 1


def test_compare_steps_names_step_key_and_values(tmp_path):
    write_run(tmp_path / "a", 2)
    write_run(tmp_path / "b", 3, **{"loss/total": 0.5, "perf/step_s": 7.0})
    assert compare_steps(tmp_path / "a", tmp_path / "b") == [
        "step 1: loss/total: 1.0 is not 0.5", "step 3: loss/total: 'absent' is not 0.5", "step 3: step: 'absent' is not 3",
        "step 3: task/db/entropy: 'absent' is not None"]


def test_a_folder_with_a_run_is_not_overwritten(tmp_path):
    with pytest.raises(ValueError, match="nothing to resume"):
        RunWriter(tmp_path, CONFIG, resume=True)
    with RunWriter(tmp_path, CONFIG):
        pass                                                # no step yet: starting again loses nothing
    write_run(tmp_path, 2)
    with pytest.raises(ValueError, match=r"already holds a run \(status finished, 2 steps\); resume it, give another out"):
        RunWriter(tmp_path, CONFIG)
    other = load_recipe("smoke", **{"rollout.lag": 3})
    with pytest.raises(ValueError, match="another configuration .rollout.lag: 1 -> 3.; resume with the old one"):
        RunWriter(tmp_path, other, resume=True)
    assert len(read_run(tmp_path).steps) == 2


def test_rows_of_a_step_without_its_line_are_dropped_on_opening(tmp_path):
    with RunWriter(tmp_path, CONFIG) as writer:
        writer.write_eval(0, [{"task": "db"}])              # killed before the line of step 0
    with RunWriter(tmp_path, CONFIG) as writer:
        writer.write_eval(0, [{"task": "db"}])
        writer.write_step(StepRecord(0, {}))
        writer.write_eval(1, [{"task": "db"}])              # killed before the line of step 1
    with RunWriter(tmp_path, CONFIG, resume=True) as writer:
        assert writer.last_step == 0
    assert read_run(tmp_path).eval["step"].tolist() == [0]


def test_one_writer_at_a_time(tmp_path):
    with RunWriter(tmp_path, CONFIG):
        with pytest.raises(BlockingIOError, match="another process writes the run"):
            RunWriter(tmp_path, CONFIG)
    with RunWriter(tmp_path, CONFIG):
        pass


@pytest.mark.parametrize("tail", [b'{"step":3,"loss', b"\0\0\0\0", b'{"step":3}garbage'])
def test_half_written_last_line_is_dropped_with_a_warning(tmp_path, tail):
    write_run(tmp_path, 2)
    path = tmp_path / "steps.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole + tail)
    with pytest.warns(UserWarning, match="steps.jsonl, line 3: half-written"):
        assert len(read_run(tmp_path).steps) == 2
    assert path.read_bytes() == whole + tail                # reading repairs nothing
    with pytest.warns(UserWarning, match="line 3"), RunWriter(tmp_path, CONFIG, resume=True) as writer:
        assert path.read_bytes() == whole
        writer.write_step(StepRecord(3, {}))
    assert path.read_bytes() == whole + b'{"step":3}\n'


def test_a_last_line_that_only_lost_its_end_is_kept(tmp_path):
    path = tmp_path / "steps.jsonl"
    path.write_bytes(b'{"step":1}\n{"step":2}')
    file = LineFile(path)
    assert file.last_step == 2 and path.read_bytes() == b'{"step":1}\n{"step":2}\n'
    file.close()


@pytest.mark.parametrize("line", [b'{"step":2,', b"[1]", b'{"step":"2"}', b"", b"\xff"])
def test_a_corrupt_line_in_the_middle_is_an_error(tmp_path, line):
    write_run(tmp_path, 3)
    path = tmp_path / "steps.jsonl"
    lines = path.read_bytes().splitlines()
    path.write_bytes(b"\n".join([lines[0], line, lines[2]]) + b"\n")
    for use in (lambda: read_run(tmp_path), lambda: RunWriter(tmp_path, CONFIG, resume=True)):
        with pytest.raises(ValueError, match="steps.jsonl, line 2 is corrupt .*restore the file, or move"):
            use()


def test_corrupt_missing_and_newer_run_json(tmp_path):
    with pytest.raises(ValueError, match="holds no run.json; list_runs"):
        read_run(tmp_path)
    write_run(tmp_path, 1)
    path = tmp_path / "run.json"
    text = path.read_text()
    path.write_text(text[:40])
    with pytest.raises(ValueError, match="run.json is corrupt"):
        read_run(tmp_path)
    path.write_text(text.replace('"schema": 1', '"schema": 99'))
    with pytest.raises(ValueError, match="record schema 99; this version reads schema 1"):
        read_run(tmp_path)


def test_list_runs(tmp_path):
    write_run(tmp_path / "b" / "x", 2)
    write_run(tmp_path / "a", 1)
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "run.json").write_text("{")
    with pytest.warns(UserWarning, match="is corrupt"):
        table = list_runs(tmp_path)
    assert table["status"].tolist() == ["finished", "finished", "unreadable"] and table["steps"].tolist() == [1, 2, 0]
    assert table["path"].tolist() == [str(tmp_path / "a"), str(tmp_path / "b/x"), str(tmp_path / "c")]
    assert table.loc[0, ["recipe", "method", "seed"]].tolist() == ["smoke", "eppo", 0]
    assert len(list_runs(tmp_path / "none")) == 0


class FullAfter:
    """A file whose disk has room for `room` more bytes."""

    def __init__(self, file, room):
        self.file, self.room = file, room

    def __getattr__(self, name):
        return getattr(self.file, name)

    def write(self, data):
        if self.room == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        count = self.file.write(data[:self.room])
        self.room -= count
        return count


def test_full_disk_loses_nothing_written(tmp_path):
    write_run(tmp_path, 2)
    before = (tmp_path / "steps.jsonl").read_bytes()
    with pytest.raises(OSError, match="disk is full: .*steps.jsonl could not be written; everything up to the previous step"):
        with RunWriter(tmp_path, CONFIG, resume=True) as writer:
            writer._files["steps"]._file = FullAfter(writer._files["steps"]._file, room=7)
            writer.write_step(StepRecord(3, {"loss/total": 1.0}))
    assert (tmp_path / "steps.jsonl").read_bytes() == before and read_run(tmp_path).info["status"] == "failed"


def test_full_disk_keeps_the_old_file(tmp_path, monkeypatch):
    write_atomically(tmp_path / "run.json", b"old")
    monkeypatch.setattr(files.os, "fsync", lambda handle: (_ for _ in ()).throw(OSError(errno.ENOSPC, "No space")))
    with pytest.raises(OSError, match="the old file is intact; free some space"):
        write_atomically(tmp_path / "run.json", b"new")
    assert os.listdir(tmp_path) == ["run.json"] and (tmp_path / "run.json").read_bytes() == b"old"


def test_a_killed_process_leaves_whole_steps(tmp_path):
    code = f"""
import os, signal
from eppo.config import load_recipe
from eppo.records import RunWriter
from eppo.types import StepRecord
writer = RunWriter({str(tmp_path)!r}, load_recipe("smoke"))
writer.write_step(StepRecord(1, {{"loss/total": 1.0}}))
writer._files["steps"]._file.write(b'{{"step": 2, "los')
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", code]).returncode == -9
    with pytest.warns(UserWarning, match="line 2: half-written"):
        run = read_run(tmp_path)
    assert run.info["status"] == "running" and run.steps["step"].tolist() == [1]
    with pytest.warns(UserWarning), RunWriter(tmp_path, CONFIG, resume=True) as writer:
        assert writer.last_step == 1                        # the dead process holds no lock
    assert read_lines(tmp_path / "steps.jsonl") == [{"step": 1, "loss/total": 1.0}]
