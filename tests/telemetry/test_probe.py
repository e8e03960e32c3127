"""The probe reads /proc and cgroups of any kind under any root, and 'not available' is a value."""

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from telemetry import probe

GIB = 1 << 30


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return root


V2 = {
    "proc/self/cgroup": "0::/system.slice/inferd.service\n",
    "sys/fs/cgroup/cgroup.controllers": "cpu memory\n",
    "sys/fs/cgroup/memory.current": "99\n",
    "sys/fs/cgroup/system.slice/memory.current": f"{3 * GIB}\n",
    "sys/fs/cgroup/system.slice/memory.max": f"{4 * GIB}\n",
    "sys/fs/cgroup/system.slice/inferd.service/memory.current": f"{GIB}\n",
    "sys/fs/cgroup/system.slice/inferd.service/memory.max": "max\n",
    "sys/fs/cgroup/system.slice/inferd.service/memory.events": "low 0\nhigh 2\nmax 9\noom 1\noom_kill 3\n",
    "sys/fs/cgroup/system.slice/inferd.service/memory.pressure": "some avg10=0.00 total=12\nfull avg10=0.00 total=5\n",
}
V1 = {
    "proc/self/cgroup": "5:cpuset:/\n4:memory,hugetlb:/docker/abc\n0::/\n",
    "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
    "sys/fs/cgroup/memory/docker/abc/memory.limit_in_bytes": "9223372036854771712\n",
    "sys/fs/cgroup/memory/docker/abc/memory.usage_in_bytes": f"{GIB}\n",
    "sys/fs/cgroup/memory/docker/abc/memory.stat": f"cache 5\nhierarchical_memory_limit {2 * GIB}\n",
    "sys/fs/cgroup/memory/docker/abc/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 7\n",
}


def test_version_2_takes_the_least_limit_of_the_group_and_those_above(tmp_path: Path) -> None:
    assert probe.cgroup(root=tree(tmp_path, V2)) == probe.Cgroup(
        version=2, limit_bytes=4 * GIB, usage_bytes=GIB, oom_kills=3, pressure_us=(12, 5)
    )


def test_version_1_takes_the_hierarchy_limit_and_no_limit_is_none(tmp_path: Path) -> None:
    root = tree(tmp_path, V1)
    assert probe.cgroup(root=root) == probe.Cgroup(version=1, limit_bytes=2 * GIB, usage_bytes=GIB, oom_kills=7)
    (root / "sys/fs/cgroup/memory/docker/abc/memory.stat").write_text("cache 5\n")
    assert probe.cgroup(root=root).limit_bytes is None


def test_a_path_of_the_host_that_is_not_mounted_here_falls_back_to_what_is(tmp_path: Path) -> None:
    files = {name.replace("system.slice/inferd.service/", ""): text for name, text in V2.items()}
    files["proc/self/cgroup"] = "0::/kubepods/pod1/c1\n"
    files["sys/fs/cgroup/memory.max"] = f"{GIB}\n"
    found = probe.cgroup(root=tree(tmp_path, files))
    assert (found.version, found.limit_bytes) == (2, GIB)


@pytest.mark.parametrize("files", [{}, {"proc/self/cgroup": ""}, {"proc/self/cgroup": "0::/\n"}])
def test_without_a_memory_cgroup_nothing_is_available(tmp_path: Path, files: dict[str, str]) -> None:
    assert probe.cgroup(root=tree(tmp_path, files)) == probe.Cgroup(version=0)


def test_the_limit_is_the_least_of_host_and_cgroup(tmp_path: Path) -> None:
    assert probe.memory_limit_bytes(tmp_path) is None
    tree(tmp_path, {"proc/meminfo": "MemTotal:       8388608 kB\nMemFree:  1 kB\nMemAvailable:    1024 kB\n"})
    assert probe.host_memory(tmp_path) == probe.HostMemory(total_bytes=8 * GIB, available_bytes=1 << 20)
    assert probe.memory_limit_bytes(tmp_path) == 8 * GIB
    assert probe.memory_limit_bytes(tree(tmp_path, V2)) == 4 * GIB


def test_our_own_memory_by_kind_sums_to_all_of_it() -> None:
    found = probe.resident()
    assert found is not None
    parts = found.anonymous_bytes + found.file_bytes + found.shared_bytes
    assert found.total_bytes == pytest.approx(parts, abs=1 << 20)
    total = probe.resident_bytes()
    assert total == pytest.approx(found.total_bytes, rel=0.2)
    assert total == pytest.approx(probe.resident_bytes(os.getpid()), rel=0.2)


def test_touched_memory_is_seen() -> None:
    before = probe.resident()
    block = bytearray(b"x") * (64 << 20)
    after = probe.resident()
    assert before is not None
    assert after is not None
    assert after.anonymous_bytes - before.anonymous_bytes > len(block) * 0.9


def test_a_process_that_is_gone_is_not_available(tmp_path: Path) -> None:
    assert probe.resident_bytes(1, tmp_path) is None
    assert probe.resident(1, tmp_path) is None
    assert probe.cpu_seconds(1, tmp_path) is None
    assert probe.mapping_bytes("x", 1, tmp_path) is None


def test_a_mapping_is_found_by_its_name(tmp_path: Path) -> None:
    smaps = (
        "7f00-7f10 rw-p 00000000 00:00 0 \nSize: 64 kB\nRss: 1 kB\n"
        "7f10-7f20 rw-s 00000000 fe:00 12 /var/lib/my model.safetensors\nSize: 64 kB\nRss: 40 kB\nPss: 20 kB\n"
        "7f20-7f30 rw-s 00000000 fe:00 12 /var/lib/my model.safetensors\nRss: 2 kB\nVmFlags: rd wr\n"
        "7f30-7f40 r--p 00000000 fe:00 13 /lib/other\nRss: 8 kB\n"
    )
    tree(tmp_path, {"proc/9/smaps": smaps})
    assert probe.mapping_bytes("/var/lib/my model.safetensors", 9, tmp_path) == 42 * 1024
    assert probe.mapping_bytes("/nothing", 9, tmp_path) is None


def test_cpu_time_is_read_past_any_process_name(tmp_path: Path) -> None:
    fields = ["S", *["0"] * 10, "250", "50", *["0"] * 20]
    tree(tmp_path, {"proc/9/stat": f"9 (a) b (c) {' '.join(fields)}"})
    assert probe.cpu_seconds(9, tmp_path) == 300 / os.sysconf("SC_CLK_TCK")
    assert (probe.cpu_seconds() or 0) > 0


def test_mappings_are_summed_by_name_and_the_largest_come_first(tmp_path: Path) -> None:
    smaps = (
        "7f00-7f10 rw-p 00000000 00:00 0 \nSize: 64 kB\nRss: 40 kB\n"
        "7f20-7f30 r--p 00000000 08:01 7 /lib/a b.so\nRss: 8 kB\n"
        "7f40-7f50 r-xp 00001000 08:01 7 /lib/a b.so\nRss: 16 kB\n"
        "7f60-7f70 rw-p 00000000 00:00 0 [heap]\nRss: 0 kB\n"
    )
    root = tree(tmp_path, {"proc/self/smaps": smaps})
    assert list(probe.largest_mappings(5, root=root).items()) == [("[anon]", 40 << 10), ("/lib/a b.so", 24 << 10)]
    assert probe.largest_mappings(1, root=root) == {"[anon]": 40 << 10}
    assert probe.largest_mappings(5, root=tmp_path / "none") == {}


def test_a_high_water_mark_that_the_kernel_does_not_set_back_is_not_known(tmp_path: Path) -> None:
    assert probe.high_water_bytes(reset=True, root=tmp_path) is None
    assert probe.high_water_bytes(root=tmp_path) is None


def test_torchs_own_segments_are_reported_by_a_process_that_uses_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    assert probe.cuda_segments(4) is None
    block = {"size": 512, "state": "inactive", "address": 7, "frames": []}
    segments = [{"device": 0, "total_size": size, "segment_type": "large", "blocks": [block]} for size in (1, 9, 5)]
    cuda = SimpleNamespace(is_initialized=lambda: True, memory_snapshot=lambda: segments)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    found = probe.cuda_segments(2)
    assert found is not None
    assert [segment["total_size"] for segment in found] == [9, 5]
    assert found[0]["blocks"] == [{"size": 512, "state": "inactive"}]
