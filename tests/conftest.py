"""What every test relies on: one thread, default signals, no display, no hub, no network; and optional data found by name."""

import os
import signal
import socket
from pathlib import Path

import pytest

for name, value in {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "TOKENIZERS_PARALLELISM": "false",
                    "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "MPLBACKEND": "Agg"}.items():
    os.environ.setdefault(name, value)

# A background job starts with SIGINT and SIGQUIT ignored, one under nohup with SIGHUP; what the tests start would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
for number in (signal.SIGQUIT, signal.SIGHUP):
    signal.signal(number, signal.SIG_DFL)

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def eppo_data():
    """A function from a relative path to the optional data file or folder; it skips the test, by name, where that is absent."""
    folder = ROOT / os.environ.get("EPPO_DATA", "../shared/data")

    def find(relative: str) -> Path:
        path = folder / relative
        if not path.exists():
            pytest.skip(f"EPPO_DATA: {relative} not found")
        return path

    return find


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    """Connections leave this machine in no test."""
    connect = socket.socket.connect

    def guarded(self, address):
        if self.family in (socket.AF_INET, socket.AF_INET6) and address[0] not in ("127.0.0.1", "::1", "localhost"):
            raise OSError(f"a test tried to reach {address[0]}; tests run without network")
        return connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", guarded)
