"""Run notebooks through papermill, strictly: one, over seeds, or as a sweep of methods and seeds.

    python notebooks/run.py train --recipe micro -p method eppo -p steps 50 --seeds 0 1 2 3 --jobs 2 --resume
    python notebooks/run.py sweep --recipe micro --jobs 2 --hours 1.5

A name or value that a notebook does not take is refused before anything starts (see parameters.py). The kernel is the
interpreter that runs this script. The executed copy, failed or not, lies in the run's folder for a notebook that trains (one
that declares recipe, method and out), else in results/notebooks. `--resume` skips what is finished and goes on with the rest.
Exit: 0 fine, 1 a notebook failed, 2 bad input, 130 Ctrl-C.
"""

from __future__ import annotations

import sys
from pathlib import Path

NOTEBOOKS = Path(__file__).resolve().parent
ROOT = NOTEBOOKS.parent
sys.path[:0] = [str(ROOT), str(NOTEBOOKS)]

from eppo.interrupts import INTERRUPTED, starting  # noqa: E402

with starting():                                            # nothing slow: torch, papermill and psutil come when they are needed
    import argparse
    import hashlib
    import json
    import os
    import re
    import signal
    import subprocess
    import time
    from collections.abc import Mapping, Sequence
    from dataclasses import dataclass
    from typing import Any

    from execute import end_processes, family, interrupt_kernels
    from parameters import declared_parameters, typed_parameters

    from eppo.checks import check_name
    from eppo.config import SHORT_KEYS, load_recipe, read_recipe, recipe_path
    from eppo.plugins import absolute_plugins, load_plugins

TRAINS = {"recipe", "method", "out"}                        # a notebook with these parameters makes one run
REPORT_S = 30                                               # between two lines of progress of several notebooks
INTERRUPT_S = 30                                            # grace for a notebook to save its run


@dataclass(frozen=True)
class Job:
    """One notebook to execute. `run_dir`, `identity` and `steps` belong to a notebook that trains, `recipe` to one that has one."""

    notebook: Path
    output: Path
    parameters: dict[str, Any]
    run_dir: Path | None = None
    identity: str = ""
    steps: int = 0
    recipe: str = ""
    warnings: tuple[str, ...] = ()

    def __str__(self) -> str:
        return " ".join([self.notebook.stem, *(f"{name}={value}" for name, value in without_resume(self.parameters).items())])


# ---- what to execute -----------------------------------------------------------------------------------------------
def find_notebook(name: str) -> Path:
    """The notebook of this folder called `name`, with or without its number and ending."""
    found = {path.stem: path for path in sorted(NOTEBOOKS.glob("*.ipynb"))}
    short = {re.sub(r"^\d+_", "", stem): stem for stem in found}
    stem = Path(name).name.removesuffix(".ipynb")
    return found[check_name("notebook", short.get(stem, stem), tuple(found))]


def plan(notebook: Path, given: Mapping[str, Any], resume: bool = False) -> Job:
    """The job that executes `notebook` with `given` parameters; the recipe and what changes it are checked here.

    Raises:
        ValueError: a parameter, recipe key or value that does not fit.
    """
    declared, values = declared_parameters(notebook), typed_parameters(notebook, given)
    if values.get("out"):
        values["out"] = os.path.abspath(values["out"])      # the kernel works in the repository's root
    for place in (values, values.get("overrides") or {}):
        place |= {"plugins": absolute_plugins(place["plugins"])} if place.get("plugins") else {}
    in_force = {name: default for name, (_, default) in declared.items()} | values
    run_dir, identity, steps, recipe, warnings = None, "", 0, in_force.get("recipe"), []
    if recipe:
        changes = {name: in_force[name] for name in SHORT_KEYS if name in in_force} | (in_force.get("overrides") or {})
        config = load_recipe(recipe, **changes)
        warnings = config.warnings
        if TRAINS <= set(declared):
            run_dir, identity, steps = config.run_dir(), config.identity(), config.steps
    if run_dir:
        output = run_dir / "notebooks" / notebook.name
    else:
        extra = json.dumps({name: value for name, value in values.items() if name not in ("recipe", "seed")}, sort_keys=True)
        parts = [notebook.stem, *([f"s{values['seed']}"] if "seed" in values else []),
                 *([hashlib.sha256(extra.encode()).hexdigest()[:8]] if extra != "{}" else [])]
        output = ROOT / "results" / "notebooks" / Path(recipe or "").stem / ("-".join(parts) + ".ipynb")
    _check_writable(output.parent)
    recorded = run_dir / "steps.jsonl" if run_dir else None
    if recorded and recorded.exists() and recorded.stat().st_size and not (resume or values.get("resume")):
        raise ValueError(f"{run_dir} already holds a run; --resume goes on with it, or give another out, or move the folder away")
    if resume and "resume" in declared and (run_dir is None or any((run_dir / "checkpoints").glob("step-*.pt"))):
        values["resume"] = True
    return Job(notebook, output, values, run_dir, identity, steps, recipe or "", tuple(warnings))


def _check_writable(folder: Path) -> None:
    """ValueError unless files can be made in `folder`, which need not exist yet."""
    there = next(path for path in (folder, *folder.parents) if path.exists())
    if not there.is_dir():
        raise ValueError(f"{there} is a file; a folder is needed there: give another out")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ValueError(f"{there} cannot be written; give another out, or its rights to this user")


def is_finished(job: Job) -> bool:
    """Whether the executed copy is there, whole, without an error and of the same parameters, and its run, if any, finished."""
    try:
        copy = json.loads(job.output.read_bytes())
        run = json.loads((job.run_dir / "run.json").read_bytes()) if job.run_dir else {"identity": "", "status": "finished"}
    except (FileNotFoundError, ValueError):
        return False
    about = copy["metadata"].get("papermill", {})
    same = without_resume(about.get("parameters", {})) == without_resume(job.parameters) and run["identity"] == job.identity
    return same and bool(about.get("end_time")) and not about.get("exception") and run["status"] == "finished"


def without_resume(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters that say what is executed, without the one that says where it starts."""
    return {name: value for name, value in parameters.items() if name != "resume"}


# ---- many notebooks --------------------------------------------------------------------------------------------------
def run(jobs: Sequence[Job], num_processes: int = 1, resume: bool = False,
        hours: float | None = None) -> tuple[list[Job], list[Job]]:
    """Execute `jobs`, `num_processes` at a time, starting none after `hours`; returns (failed, not started)."""
    outputs = [job.output for job in jobs]
    if repeated := [job for index, job in enumerate(jobs) if job.output in outputs[:index]]:
        raise ValueError(f"asked for twice: {repeated[0]}")
    waiting = [job for job in jobs if not (resume and is_finished(job))]
    notebooks = f"{len(jobs)} notebooks" if len(jobs) != 1 else "1 notebook"
    print(f"{notebooks}, {len(jobs) - len(waiting)} already finished, {num_processes} at a time", flush=True)
    if waiting:
        print("starting a kernel; its first cell imports torch, which takes a while", flush=True)
    started, failed, running, reported = time.monotonic(), [], {}, time.monotonic()
    try:
        while running or (waiting and not _out_of_time(started, hours)):
            while waiting and len(running) < num_processes and not _out_of_time(started, hours):
                job = waiting.pop(0)
                running[_start(job, progress=num_processes == 1, limited=num_processes > 1)] = (job, time.monotonic())
            time.sleep(0.05)
            if num_processes > 1 and time.monotonic() - reported > REPORT_S:
                reported = time.monotonic()
                print("; ".join(_progress(job, reported - since) for job, since in running.values()), flush=True)
            for process in [process for process in running if process.poll() is not None]:
                job, since = running.pop(process)
                word = "FAILED" if process.returncode else "done"
                print(f"{word}: {job} ({time.monotonic() - since:.0f} s) -> {job.output}", flush=True)
                failed += [job] if process.returncode else []
    except KeyboardInterrupt:
        begun = [process for process, (job, since) in running.items() if _has_begun(job, time.time() - time.monotonic() + since)]
        print("\ninterrupted; " + (f"waiting up to {INTERRUPT_S} s for {len(begun)} notebooks to save their runs (Ctrl-C again: do not "
                                   "wait)" if begun else "no cell was begun yet"), flush=True)
        try:
            interrupt_kernels(begun, INTERRUPT_S)
        finally:
            end_processes([child for process in running for child in family(process)])
        left = [job for job, _ in running.values()] + waiting
        print("not finished (the same command with --resume goes on):\n" + "\n".join(f"  {job}" for job in left), flush=True)
        raise
    return failed, waiting


def _progress(job: Job, seconds: float) -> str:
    """Where a notebook that trains stands, from its records; of others, how long it has been running."""
    if not job.steps:
        return f"{job.notebook.stem}: {seconds:.0f} s"
    try:
        lines = (job.run_dir / "steps.jsonl").read_bytes().splitlines()[1:]
        recent = [json.loads(line)["perf/step_s"] for line in lines[-10:]]
    except (FileNotFoundError, ValueError, KeyError):       # not begun, or a line half written
        return f"{job.run_dir.name}: starting"
    left = f", about {sum(recent) / len(recent) * (job.steps - len(lines)) / 60:.1f} min left" if recent else ""
    return f"{job.run_dir.name}: step {len(lines)}/{job.steps}{left}"


def _out_of_time(started: float, hours: float | None) -> bool:
    return hours is not None and time.monotonic() - started >= hours * 3600


def _has_begun(job: Job, since: float) -> bool:
    """Whether a cell was begun in an execution that started at `since` (clock): papermill saves the copy before each cell."""
    try:
        cells = json.loads(job.output.read_bytes())["cells"] if job.output.stat().st_mtime >= since else []
    except (FileNotFoundError, ValueError):                 # not there yet, or being written
        return job.output.exists()
    return any(cell["metadata"].get("papermill", {}).get("status", "pending") != "pending" for cell in cells)


def _start(job: Job, progress: bool, limited: bool) -> subprocess.Popen[bytes]:
    order = json.dumps([str(job.notebook), str(job.output), job.parameters, progress])
    environment = os.environ | ({"OMP_NUM_THREADS": "1"} if limited else {})
    return subprocess.Popen([sys.executable, str(NOTEBOOKS / "execute.py"), order], env=environment, start_new_session=True)


# ---- command line ----------------------------------------------------------------------------------------------------
def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="notebooks/run.py", description=__doc__.partition("\n")[0])
    parser.add_argument("name", help="a notebook, with or without its number, or: sweep")
    parser.add_argument("--recipe", help="name in notebooks/recipes, or a path ending in .yaml")
    parser.add_argument("-p", dest="parameters", nargs="+", action="append", default=[], metavar=("NAME", "VALUE"),
                        help="a parameter; several values make a list; for a sweep also methods and seeds")
    parser.add_argument("--seeds", nargs="+", help="run once per seed; a notebook with a parameter `seeds` gets them all at once")
    parser.add_argument("--jobs", type=int, default=1, help="notebooks at a time (above 1: one thread each)")
    parser.add_argument("--hours", type=float, help="sweep: start nothing after this long")
    parser.add_argument("--resume", action="store_true", help="skip what is finished, go on with what is not")
    options = parser.parse_args(arguments)
    try:
        with starting():
            jobs = _plan_all(options)
        for line in _about(jobs, bool(options.recipe)):
            print(line, flush=True)
        failed, left = run(jobs, options.jobs, options.resume or options.name == "sweep", options.hours)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return INTERRUPTED
    if left:
        print("left (the same command goes on):\n" + "\n".join(f"  {job}" for job in left))
    if failed:
        print(f"{len(failed)} failed:\n" + "\n".join(f"  {job.output}" for job in failed), file=sys.stderr)
    return 1 if failed else 0


def _plan_all(options: argparse.Namespace) -> list[Job]:
    """Every notebook that the command line asks for, checked. ValueError says what does not fit."""
    given: dict[str, Any] = {}
    for name, *values in options.parameters:
        if not values or name in given:
            raise ValueError(f"-p {name} needs a value" if not values else f"-p {name} is given twice")
        given[name] = values[0] if len(values) == 1 else values
    if options.jobs < 1:
        raise ValueError(f"--jobs {options.jobs} must be at least 1")
    sweep = options.name == "sweep"
    notebook = find_notebook("train" if sweep else options.name)
    if options.recipe:
        given["recipe"] = options.recipe
    if sweep:
        if not options.recipe:
            raise ValueError("a sweep needs --recipe")
        if "plugins" in given:                              # the recipe may name what they register
            load_plugins(absolute_plugins(typed_parameters(notebook, {"plugins": given["plugins"]})["plugins"] or []))
        own = read_recipe(options.recipe).get("sweep", {})
        methods, seeds = (_several(given.pop(name, own.get(name)), name) for name in ("methods", "seeds"))
        points = [{"method": method, "seed": seed} for seed in options.seeds or seeds for method in methods]
    else:
        if options.hours is not None:
            raise ValueError("--hours is for a sweep")
        asked = options.seeds or []
        several = "seeds" in declared_parameters(notebook)  # it goes through its seeds itself
        points = ([{"seeds": asked}] if several and asked else [{"seed": seed} for seed in asked]) or [{}]
    return [plan(notebook, given | point, options.resume or sweep) for point in points]


def _about(jobs: Sequence[Job], named: bool) -> list[str]:
    """The recipe, where it is and who chose it; then the runs' warnings."""
    recipe = jobs[0].recipe
    lines = [f"recipe {Path(recipe).stem}: {os.path.relpath(recipe_path(recipe))}"
             + ("" if named or "recipe" in jobs[0].parameters else " (the notebook's default; --recipe takes another)")] if recipe else []
    return lines + [f"warning: {text}" for text in dict.fromkeys(text for job in jobs for text in job.warnings)]


def _several(values: Any, name: str) -> list[Any]:
    if not values:
        raise ValueError(f"the sweep has no {name}: give sweep.{name} in the recipe or -p {name} ...")
    return [values] if isinstance(values, str) else list(values)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main(sys.argv[1:]))
