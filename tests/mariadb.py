"""A MariaDB of our own on loopback, for the tests that need a real server."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time

import pytest

from envs.db_env import slots


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    """The URL of a server that is started for the module, with a data directory of its own."""
    pytest.importorskip("pymysql", reason="PyMySQL is not installed (extra mysql)")
    programs = [shutil.which(name, path=os.environ["PATH"] + ":/usr/sbin") for name in ("mariadbd", "mariadb-install-db")]
    if None in programs:
        pytest.skip("mariadb-server is not installed")
    home = tmp_path_factory.mktemp("maria")
    user = ["--user=root"] if os.getuid() == 0 else []
    (home / "empty").mkdir()
    subprocess.run([programs[1], "--no-defaults", f"--datadir={home / 'data'}", "--auth-root-authentication-method=normal",
                    *user], check=True, capture_output=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen(
        [programs[0], "--no-defaults", f"--datadir={home / 'data'}", f"--socket={home / 'sock'}", f"--port={port}",
         "--bind-address=127.0.0.1", "--skip-name-resolve", "--innodb-flush-log-at-trx-commit=0", "--local-infile=0",
         f"--secure-file-priv={home / 'empty'}", f"--pid-file={home / 'pid'}", *user],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    address, deadline = f"mysql://root@127.0.0.1:{port}", time.monotonic() + 60
    while reason := slots.unavailable(address):
        assert time.monotonic() < deadline and process.poll() is None, reason
        time.sleep(0.1)
    yield address
    slots.SLOTS.close()
    process.terminate()
    process.wait(30)
