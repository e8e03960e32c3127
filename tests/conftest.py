"""What holds for every test: few threads, small pages, a clean environment, and no GPU test where there is no GPU."""

import ctypes
import os
from pathlib import Path

# Before anything imports torch: two cores are shared with an engine process that tests may start.
os.environ.setdefault("OMP_NUM_THREADS", "2")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import pytest

# Figures of memory are what was asked for, not what a kernel whose huge pages are always on makes of it. Inherited.
_PR_SET_THP_DISABLE = 41
ctypes.CDLL(None).prctl(_PR_SET_THP_DISABLE, 1, 0, 0, 0)

REPO = Path(__file__).resolve().parent.parent


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """The developer's own INFERD_*, OTEL_* and state do not reach a test, nor the other way round. The model cache
    stays: the real model is fetched once."""
    for name in list(os.environ):
        if name.startswith(("INFERD_", "OTEL_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path_factory.mktemp("run")))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.mktemp("config")))


@pytest.fixture(scope="session")
def repo() -> Path:
    """The repository's root."""
    return REPO


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests marked `gpu` are deselected, not skipped, where no NVIDIA driver is loaded: a skip is worth a look."""
    if Path("/proc/driver/nvidia/version").exists():
        return
    wanted = [item for item in items if item.get_closest_marker("gpu") is None]
    if len(wanted) < len(items):
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("gpu")])
        items[:] = wanted
