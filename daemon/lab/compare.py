"""`inferd bench compare`: what changed between two reports, which figures differ, and whether that is noise. Pure.

Owns the differences and their words; the statistics are daemon/lab/stats.py's. Enter at `compared`, then `render`.
"""

from typing import Any, Final

from daemon.lab import stats
from daemon.lab.gather import better
from daemon.lab.record import Report, Run

_UNIMPORTANT: Final = ("started_at", "title", "port", "state_dir")
_COUNTS: Final = ("requests", "output_tokens", "prompt_tokens", "server_requests", "server_output_tokens")
_MATTERS: Final = 0.02  # a certain difference below this is said, but called small


def compared(old: Report, new: Report) -> dict[str, Any]:
    """JSON-ready: `changed` (what was set, run and measured on), `figures` (a row a side and figure), `notes`."""
    shared = [side for side in old.sides if side in new.sides]
    pairs = [(side, side) for side in shared]
    notes = []
    if not shared and len(old.sides) == len(new.sides) == 1:
        pairs = [(old.sides[0], new.sides[0])]
        notes.append(f"the loads have different names: {old.sides[0]!r} is compared with {new.sides[0]!r}")
    missing = sorted(set(old.sides) ^ set(new.sides)) if shared else []
    if missing:
        notes.append(f"only in one of them: {', '.join(missing)}")
    if not pairs:
        notes.append("the reports have no side in common: there is nothing to compare")
    if old.kind != new.kind:
        notes.append(f"they are of different kinds: {old.kind} and {new.kind}")
    if old.machine != new.machine:
        notes.append("they were measured on different machines, or limits of it: figures of time do not compare")
    if old.seeds != new.seeds:
        notes.append("their seeds differ: not the same requests were sent")
    rows = [row for pair in pairs for row in _rows(old, new, *pair)]
    if any(row["noise"] is None for row in rows):
        notes.append("where a side ran once, nobody can tell a difference from noise: repeat it, interleaved")
    return {"changed": _changed(old, new, pairs), "figures": rows, "notes": notes}


def _changed(old: Report, new: Report, pairs: list[tuple[str, str]]) -> list[dict[str, Any]]:
    parts: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
        ("", _plain(old), _plain(new)),
        ("setting", old.settings, new.settings),
        ("version", dict(old.versions), dict(new.versions)),
        ("machine", old.machine, new.machine),
    ]
    for before, after in pairs:
        parts.append((f"setting of {after}", old.of(before)[0].settings, new.of(after)[0].settings))
    found = []
    for part, before_all, after_all in parts:
        for name in dict.fromkeys([*before_all, *after_all]):
            was, now = before_all.get(name), after_all.get(name)
            if was != now and name not in _UNIMPORTANT:
                found.append({"what": f"{part} {name}".strip(), "before": was, "after": now})
    return found


def _plain(report: Report) -> dict[str, Any]:
    return {"model": report.model, "kind": report.kind, "seeds": report.seeds}


def _rows(old: Report, new: Report, before: str, after: str) -> list[dict[str, Any]]:
    names = [name for name in _names(old.of(before)) if name in _names(new.of(after)) and name not in _COUNTS]
    rows = []
    for name in names:
        olds, news = old.values(before, name), new.values(after, name)
        ratio = stats.ratio(news, olds, paired=False)
        row: dict[str, Any] = {
            "side": after,
            "figure": name,
            "before": sum(olds) / len(olds),
            "after": sum(news) / len(news),
            "runs": [len(olds), len(news)],
            "ratio": round(ratio.middle, 4) if ratio else None,
            "low": round(ratio.low, 4) if ratio and ratio.low is not None else None,
            "high": round(ratio.high, 4) if ratio and ratio.high is not None else None,
            "noise": ratio.noise if ratio else None,
        }
        rows.append({**row, "verdict": _verdict(row)})
    return rows


def _names(runs: list[Run]) -> list[str]:
    return list(dict.fromkeys(name for run in runs for name in run.figures))


def _verdict(row: dict[str, Any]) -> str:
    if row["before"] == row["after"]:
        return "the same"
    if row["ratio"] is None:
        return "differs; no ratio of it"
    if row["noise"] is None:
        return "one run: cannot say"
    if row["noise"]:
        return "noise"
    word = "better" if better(row["figure"], row["ratio"]) else "worse"
    return word if abs(row["ratio"] - 1) >= _MATTERS else f"{word}, a little"


def render(found: dict[str, Any]) -> str:
    """For a person: what changed, then the figures."""
    lines = ["What changed:" if found["changed"] else "Nothing was set differently."]
    lines += [f"  {row['what']}: {row['before']} → {row['after']}" for row in found["changed"]]
    side = None
    for row in found["figures"]:
        if row["side"] != side:
            side = row["side"]
            lines += ["", f"{side:<32}{'before':>12}{'after':>12}{'ratio':>8}  95 % interval     verdict"]
        interval = "–" if row["low"] is None else f"{row['low']:.3f} to {row['high']:.3f}"
        ratio = "–" if row["ratio"] is None else f"{row['ratio']:.3f}"
        name, before, after = row["figure"], row["before"], row["after"]
        lines.append(f"  {name:<30}{before:>12.4g}{after:>12.4g}{ratio:>8}  {interval:<16}  {row['verdict']}")
    return "\n".join([*lines, *(f"note: {note}" for note in found["notes"])])
