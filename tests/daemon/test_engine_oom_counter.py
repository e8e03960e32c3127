"""The control group's counter of out-of-memory kills, v2, v1 and none; and what a dead daemon leaves behind."""

import subprocess
from pathlib import Path

from daemon.engine_life import sweep
from daemon.oom import oom_kills


def test_the_counter_is_read_from_either_version_or_is_zero(tmp_path: Path) -> None:
    membership = tmp_path / "membership"
    assert oom_kills(tmp_path, membership) == 0
    membership.write_text("0::/unit\n")
    assert oom_kills(tmp_path, membership) == 0
    (tmp_path / "unit").mkdir()
    (tmp_path / "unit" / "memory.events").write_text("low 1\noom 4\noom_kill 3\noom_group_kill 0\n")
    assert oom_kills(tmp_path, membership) == 3
    membership.write_text("7:cpu:/x\n6:memory:/x\n")
    (tmp_path / "memory" / "x").mkdir(parents=True)
    (tmp_path / "memory" / "x" / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 2\n")
    assert oom_kills(tmp_path, membership) == 2


def test_only_what_a_dead_daemon_left_is_swept(tmp_path: Path) -> None:
    dead = subprocess.Popen(["true"])
    dead.wait()
    names = {f"engine-{dead.pid}-abc": False, f"engine-{Path('/proc/self').resolve().name}-abc": True, "engine-x": True}
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / "c").touch()
    sweep(tmp_path)
    assert {name: (tmp_path / name).exists() for name in names} == names
    sweep(tmp_path / "missing")
