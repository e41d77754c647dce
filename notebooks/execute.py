"""One notebook in a process of its own, for run.py: `python notebooks/execute.py '[notebook, output, parameters, progress]'`.

The kernel is the interpreter that runs this script. Exit: 0 fine, 1 the notebook failed, 143 ended by SIGTERM.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import psutil

ROOT = Path(__file__).resolve().parent.parent
END_S = 10                                                  # grace for a process to end


def execute(notebook: str, output: str, parameters: dict[str, Any], progress: bool) -> int:
    """Execute a notebook in this process; 0 or 1. The copy is saved cell by cell, and with the error if there is one."""
    import psutil

    _adopt_orphans()
    # jsonschema's checker of international addresses builds a grammar when it is imported: seconds for nothing that a notebook has.
    sys.modules.setdefault("rfc3987_syntax", None)
    import papermill
    from ipykernel.kernelspec import write_kernel_spec

    Path(output).parent.mkdir(parents=True, exist_ok=True)
    try:
        with tempfile.TemporaryDirectory() as folder:
            write_kernel_spec(Path(folder, "kernels", "python3"), extra_arguments=["--log-level=ERROR"])
            os.environ["JUPYTER_PATH"] = os.pathsep.join([folder, *filter(None, [os.environ.get("JUPYTER_PATH")])])
            papermill.execute_notebook(notebook, output, parameters, kernel_name="python3", cwd=ROOT, progress_bar=progress)
        return 0
    except papermill.PapermillExecutionError as error:
        print(f"{Path(notebook).stem}: cell {error.exec_count}: {error.ename}: {error.evalue}", file=sys.stderr)
    except Exception as error:                              # a dead kernel, a full disk: papermill leaves no trace in the copy
        text = f"{type(error).__name__}: {error} (killed from outside? out of memory?)"
        print(f"{Path(notebook).stem}: {text}", file=sys.stderr)
        _mark_failed(Path(output), text)
    finally:
        end_processes(psutil.Process().children(recursive=True))
    return 1


def _mark_failed(output: Path, text: str) -> None:
    import nbformat

    if output.exists():
        copy = nbformat.read(output, as_version=4)
        copy.metadata.papermill["exception"] = True
        copy.cells.insert(0, nbformat.v4.new_markdown_cell(f"**The execution ended early: {text}**"))
        nbformat.write(copy, output)


def _adopt_orphans() -> None:
    """On Linux, let the children of a killed kernel become ours, so that they can be ended, and end when our parent does."""
    if sys.platform == "linux":
        pr_set_pdeathsig, pr_set_child_subreaper = 1, 36
        libc = ctypes.CDLL(None, use_errno=True)
        libc.prctl(pr_set_child_subreaper, 1, 0, 0, 0)
        libc.prctl(pr_set_pdeathsig, signal.SIGTERM, 0, 0, 0)


def end_processes(processes: Sequence[psutil.Process]) -> None:
    """Terminate, wait, kill."""
    import psutil

    for send in (psutil.Process.terminate, psutil.Process.kill):
        for process in processes:
            try:
                send(process)
            except psutil.NoSuchProcess:
                continue
        _, processes = psutil.wait_procs(processes, timeout=END_S)


def family(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """A process and all below it; [] when it is gone."""
    import psutil

    try:
        parent = psutil.Process(process.pid)
        return [parent, *parent.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def interrupt_kernels(processes: Sequence[subprocess.Popen[bytes]], wait_s: float) -> None:
    """What Ctrl-C does in a notebook: KeyboardInterrupt in the running cell, so that a run can write its checkpoint; waited for."""
    import psutil

    for member in [member for process in processes for member in family(process)]:
        try:
            if "ipykernel_launcher" in member.cmdline():
                member.send_signal(signal.SIGINT)
        except psutil.NoSuchProcess:
            continue
    deadline = time.monotonic() + wait_s
    while time.monotonic() < deadline and any(process.poll() is None for process in processes):
        time.sleep(0.05)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(execute(*json.loads(sys.argv[1])))
