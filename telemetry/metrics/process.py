"""Rows about our own processes: life, lag, size, what telemetry lost, what is running."""

from telemetry import buckets
from telemetry.events import INCIDENT_CAUSES, LOOPS
from telemetry.metric import OPEN, Metric, Reading, View, each, one

_CONFIG = ("device", "dtype", "kv_dtype", "block_size", "rows", "step_tokens", "max_model_len", "kv_blocks")
_PROCESSES = ("daemon", "engine")


def _since(view: View, at_ns: int | None) -> list[Reading]:
    return [] if at_ns is None else one(max(0, view.now_ns - at_ns) / 1e9)


def _progress(view: View) -> list[Reading]:
    """What events say, or the engine's own pulse, whichever is newer: a step that lasts tells only the latter."""
    told_ns, age_ns = view.state.progress_ns, view.outside.progress_age_ns
    return _since(view, told_ns if told_ns is None or age_ns is None else max(told_ns, view.now_ns - age_ns))


def _dropped(view: View) -> list[Reading]:
    return each({**view.outside.dropped, "engine": view.state.engine_dropped, "fold_errors": view.state.unfolded})


def _entries(view: View) -> list[Reading]:
    status = view.state.status
    inside: list[Reading] = [(("engine", name), size) for name, size in (status.sizes if status else {}).items()]
    return [*inside, *((("daemon", name), size) for name, size in view.outside.sizes.items())]


def _resident(view: View) -> list[Reading]:
    status, own = view.state.status, view.outside.resident_bytes
    known = {"daemon": own, "engine": status.rss_bytes if status and status.rss_bytes else None}
    return [((name,), size) for name, size in known.items() if size is not None]


def _cpu(view: View) -> list[Reading]:
    known = {"daemon": view.outside.cpu_seconds, "engine": view.state.engine_cpu_ns / 1e9 or None}
    return [((name,), seconds) for name, seconds in known.items() if seconds is not None]


def _config(view: View) -> list[Reading]:
    started = view.state.started
    return [(tuple(str(started.resolved.get(name, "")) for name in _CONFIG), 1)] if started else []


ROWS = (
    Metric(
        "inferd_incidents",
        "counter",
        "Faults that were classified and written down.",
        lambda view: each(view.state.incident_counts),
        {"cause": INCIDENT_CAUSES},
    ),
    Metric(
        "inferd_engine_restarts",
        "counter",
        "Engines started again, by what ended the one before.",
        lambda view: each(view.state.restarts),
        {"cause": INCIDENT_CAUSES},
    ),
    Metric(
        "inferd_engine_progress_age_seconds",
        "gauge",
        "Since the engine's last step, part of a step, or idle tick.",
        _progress,
    ),
    Metric(
        "inferd_snapshot_age_seconds",
        "gauge",
        "Since the engine's last report of its state.",
        lambda view: _since(view, view.state.status.at_ns if view.state.status else None),
    ),
    Metric(
        "inferd_loop_lag_seconds",
        "histogram",
        "How late an event loop woke up: one that starves is visible.",
        lambda view: each({name: lag for name, lag in view.state.lag.items() if lag.count}),
        {"loop": LOOPS},
        buckets.LAG,
    ),
    Metric(
        "inferd_telemetry_dropped",
        "counter",
        "Events that a sink did not get; metric_rows counts rows that could not be shown.",
        lambda view: [*_dropped(view), (("metric_rows",), view.outside.row_errors)],
        {"sink": OPEN},
    ),
    Metric(
        "inferd_map_entries",
        "gauge",
        "Entries of every queue and map that can grow.",
        _entries,
        {"process": _PROCESSES, "map": OPEN},
    ),
    Metric(
        "inferd_process_resident_bytes",
        "gauge",
        "Resident memory (RSS).",
        _resident,
        {"process": _PROCESSES},
    ),
    Metric("inferd_process_cpu_seconds", "counter", "CPU time used.", _cpu, {"process": _PROCESSES}),
    Metric(
        "inferd_build_info",
        "gauge",
        "1, with the versions as labels.",
        lambda view: [((view.build.get("version", ""), view.build.get("python", "")), 1)] if view.build else [],
        {"version": OPEN, "python": OPEN},
    ),
    Metric(
        "inferd_config_info",
        "gauge",
        "1, with what was decided at start as labels.",
        _config,
        dict.fromkeys(_CONFIG, OPEN),
    ),
)
