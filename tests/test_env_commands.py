"""`python -m envs`: bench, check and fetch."""

from __future__ import annotations

import argparse
import functools
import http.server
import io
import subprocess
import sys
import tarfile
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import envs
from envs import __main__ as command
from envs.commands import bench, fetch, sources
from envs.commands.markdown import table
from envs.commands.sources import Item


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[Path, str]]:
    """A folder and the address at which it is served."""
    folder = tmp_path / "served"
    folder.mkdir()
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(folder))
    handler.log_message = lambda *_: None
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as service:
        threading.Thread(target=service.serve_forever, daemon=True).start()
        yield folder, f"http://127.0.0.1:{service.server_port}"
        service.shutdown()


def archive(path: Path, files: dict[str, str]) -> None:
    if path.suffix == ".zip":
        with zipfile.ZipFile(path, "w") as file:
            for name, text in files.items():
                file.writestr(name, text)
        return
    with tarfile.open(path, "w:gz") as file:
        for name, text in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(text)
            file.addfile(entry, io.BytesIO(text.encode()))


def use_items(monkeypatch: pytest.MonkeyPatch, *items: Item) -> None:
    monkeypatch.setattr(sources, "ITEMS", {"kg": items})
    monkeypatch.setattr(fetch, "ITEMS", {"kg": items})


# ---- the table of commands ------------------------------------------------------------------------------------------------
def test_commands_are_listed_and_unknown_ones_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main([]) == 0
    listed = capsys.readouterr().out
    assert all(f"\n  {name} " in listed for name in ("bench", "check", "fetch"))
    assert command.main(["chek"]) == 2
    assert "did you mean 'check'?" in capsys.readouterr().err
    for name in ("bench", "check", "fetch"):
        with pytest.raises(SystemExit) as ended:
            command.main([name, "--help"])
        assert ended.value.code == 0 and f"python -m envs {name}" in capsys.readouterr().out


def test_tables_are_markdown() -> None:
    rows = [{"a": 1.23456, "b": "x|y"}, {"a": 12345.6}, {"a": 3, "b": 0.0}]
    assert table(rows, ("a", "b")) == "| a      | b    |\n| ------ | ---- |\n| 1.23   | x\\|y |\n| 12,346 | -    |\n| 3      | 0    |"


# ---- fetch ----------------------------------------------------------------------------------------------------------------
def test_fetch_downloads_files_and_members_of_archives(server: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                       capsys: pytest.CaptureFixture[str]) -> None:
    folder, address = server
    (folder / "one.json").write_text("[1]")
    archive(folder / "repo.tar.gz", {"repo-1/data/a.json": "a", "repo-1/data/b/c.json": "c", "repo-1/other": "no"})
    archive(folder / "games.zip", {"json/train/x/game": "g", "json/valid/y/game": "v"})
    use_items(monkeypatch, Item("kg/one.json", "a file", f"{address}/one.json"),
              Item("kg/a.json", "a member", f"{address}/repo.tar.gz", "data/a.json"),
              Item("kg/all/", "a folder", f"{address}/repo.tar.gz", "data/"),
              Item("kg/train/", "games", f"{address}/games.zip", "json/train/"))
    data = tmp_path / "data"
    assert command.main(["fetch", "kg", "--path", str(data), "--dry-run"]) == 1
    assert not data.exists() and f"{address}/repo.tar.gz : data/a.json" in capsys.readouterr().out
    assert command.main(["fetch", "kg", "--path", str(data)]) == 0
    found = {path.relative_to(data).as_posix(): path.read_text() for path in sorted(data.rglob("*")) if path.is_file()}
    assert found == {"kg/one.json": "[1]", "kg/a.json": "a", "kg/all/a.json": "a", "kg/all/b/c.json": "c", "kg/train/x/game": "g"}
    (folder / "one.json").unlink()
    assert command.main(["fetch", "kg", "--path", str(data)]) == 0          # nothing is fetched twice
    assert "not fetched" not in capsys.readouterr().err


def test_fetch_says_what_it_cannot_get(server: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                       capsys: pytest.CaptureFixture[str]) -> None:
    folder, address = server
    archive(folder / "bad.tar.gz", {"repo/../../escape": "x"})
    (folder / "page.html").write_text("<html>sign in</html>")
    (folder / "broken.zip").write_bytes(b"PK no zip")
    use_items(monkeypatch, Item("kg/gone.json", "", f"{address}/gone.json"), Item("kg/page.json", "", f"{address}/page.html"),
              Item("kg/broken/", "", f"{address}/broken.zip", "x/"), Item("kg/escape/", "", f"{address}/bad.tar.gz", "../../"),
              Item("kg/far.json", "", "http://192.0.2.1/far.json"), Item("kg/extra.json", "", f"{address}/extra", optional=True))
    assert command.main(["fetch", "--path", str(tmp_path / "data")]) == 1
    said = capsys.readouterr()
    for reason in ("404", "a web page", "not be opened", "leads out of it", "tests run without network"):
        assert reason in said.err, reason
    assert "no (optional)" in said.out
    assert not [path for path in (tmp_path / "data").rglob("*") if path.is_file()]
    assert not (tmp_path / "escape").exists()


def test_fetch_needs_a_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EPPO_DATA", raising=False)
    with pytest.raises(SystemExit):
        command.main(["fetch"])


def test_fetch_tells_what_the_shared_files_are_good_for(eppo_data, capsys: pytest.CaptureFixture[str]) -> None:
    folder = eppo_data("webshop").parent
    command.main(["fetch", "webshop", "--dry-run", "--path", str(folder)])
    said = " ".join(capsys.readouterr().out.split())
    assert "webshop/documents*.jsonl.gz (1)" in said and "| webshop | test | 200 | 586 |" in said


# ---- check ----------------------------------------------------------------------------------------------------------------
def test_check_prints_the_contracts_rows(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["check", "webshop", "--size", "micro", "--split", "dev", "--sample", "1"]) == 0
    assert capsys.readouterr().out.count("| webshop | micro | dev") == 5
    assert command.main(["check", "alfworld", "--source", "official", "--path", "/nowhere"]) == 1
    assert "no official games" in capsys.readouterr().err


def test_check_lists_the_official_goals_that_cannot_be_won(eppo_data, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(eppo_data("webshop").parent)
    assert command.main(["check", "webshop", "--oracle", "--source", "official", "--split", "test", "--path", folder]) == 0
    assert "reward 1 on 200 of 200" in capsys.readouterr().out
    assert command.main(["check", "webshop", "--oracle", "--source", "official", "--split", "test", "--rules", "agentbench",
                         "--path", folder]) == 1
    said = capsys.readouterr().out
    assert "reward 1 on 194 of 200" in said and said.count("does not count as itself: the chosen one is cut to") == 6


# ---- bench ----------------------------------------------------------------------------------------------------------------
def test_bench_measures_a_case() -> None:
    case = {"task": "alfworld", "source": "generated", "size": "small", "backend": None, "rules": "strict", "path": None}
    row = bench.measure(case, seconds=0.05, cycles=5)
    assert row["steps_per_s"] > 1000 and row["resets_per_s"] > 50 and row["cycles"] == 5
    assert 10 < row["memory_mb"] < 4096 and abs(row["growth_mb"]) < 5
    assert bench.measure(case | {"source": "official", "path": "/nowhere"}, 0.05, 5)["note"].startswith("alfworld: no official games")


def test_bench_prints_a_table_of_cases_each_in_its_process(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["bench", "alfworld", "--size", "micro", "--engine", "own", "--source", "generated", "--seconds", "0.05",
                         "--cycles", "3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[1::2][:4] == ["task", "engine", "source", "size"] and len(lines) == 3
    assert lines[2].split()[1:8:2] == ["alfworld", "own", "generated", "micro"]


def test_memory_counts_children() -> None:
    before = bench.memory_mb()
    program = "block = b'x' * (64 * 2 ** 20); print(len(block), flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout.readline().strip() == str(64 * 2 ** 20)
        during = bench.memory_mb()
        child.communicate("\n")
    assert 64 < during - before < 100 and abs(bench.memory_mb() - before) < 5


@pytest.mark.parametrize("task", envs.TASKS)
def test_bench_has_cases_for_every_task(task: str) -> None:
    options = argparse.Namespace(engine=None, source=None, size=None, rules="strict", path=None)
    found = [(case["source"], case["size"]) for case in bench.cases(task, options)]
    assert {("generated", size) for size in envs.env_class(task).sizes} | {("official", "")} <= set(found)
