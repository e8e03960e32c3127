"""A report as one HTML page: plots first, then tables; nothing is fetched and no script runs. Pure.

Owns the page's order, words and style. The plots' geometry is daemon/lab/svg.py's. Enter at `page`.
"""

from html import escape
from typing import Any, Final

from daemon.lab import panels, svg
from daemon.lab.gather import better
from daemon.lab.record import Effect, Report, Run

_FORESTS: Final = {
    "output_tokens_per_s": "Output tokens a second",
    "ttft_p50_s": "Time to first token, median",
    "ttft_p95_s": "Time to first token, p95",
    "inter_token_p95_s": "Gap between tokens, p95",
    "same_answers": "Share of answers that are the same",
    "peak_in_use_bytes": "Most memory in use",
    "peak_kv_active_bytes": "Most KV memory active",
}
_STYLE: Final = """
:root{--bg:#fff;--ink:#1b2430;--soft:#667;--rule:#dfe3ea;--card:#f7f8fa;--good:#15803d;--bad:#b91c1c}
@media(prefers-color-scheme:dark){:root{--bg:#12161d;--ink:#dde3ec;--soft:#93a0b4;--rule:#2b3442;--card:#1a2029;
--good:#4ade80;--bad:#f87171}}
body{background:var(--bg);color:var(--ink);font:15px/1.5 system-ui,sans-serif;max-width:1100px;margin:2em auto;
padding:0 1em}
h1{font-size:1.5em;margin:0}h2{font-size:1.15em;margin:2em 0 .4em;border-bottom:1px solid var(--rule)}
h3{font-size:.95em;margin:1.2em 0 .2em}p.about,p.why{color:var(--soft);margin:.2em 0}
figure{margin:0;background:var(--card);border:1px solid var(--rule);border-radius:8px;padding:.6em .8em}
figcaption{font-weight:600;font-size:.9em}.plots{display:grid;grid-template-columns:repeat(auto-fit,minmax(430px,1fr));
gap:.8em}
svg{width:100%;height:auto;display:block}.grid{stroke:var(--rule)}.tick{fill:var(--soft);font:11px system-ui;
text-anchor:end}.tick.mid{text-anchor:middle}.line{fill:none;stroke-width:1.6}.dashed{stroke-dasharray:5 4}
.bound{stroke:var(--bad);stroke-dasharray:5 4;stroke-width:1.3}.area{fill-opacity:.75}.dot{fill-opacity:.55}
.mark line{stroke:var(--ink);stroke-opacity:.35}.mark circle{fill:var(--ink);fill-opacity:.6}
.whisker{stroke-width:2.5}.good{fill:var(--good);stroke:var(--good)}.bad{fill:var(--bad);stroke:var(--bad)}
.quiet{fill:var(--soft);stroke:var(--soft)}g text{stroke:none}
.legend{font-size:.78em;color:var(--soft);display:flex;flex-wrap:wrap;gap:.1em .9em}
.legend i{display:inline-block;width:.8em;height:.8em;border-radius:2px;margin-right:.35em}
table{border-collapse:collapse;font-size:.86em;margin:.4em 0;display:block;overflow-x:auto}
td,th{padding:.18em .8em .18em 0;text-align:right;border-bottom:1px solid var(--rule);white-space:nowrap}
th:first-child,td:first-child{text-align:left}td.words{text-align:left;white-space:normal}
b.yes{color:var(--good)}b.no{color:var(--bad)}
"""
_COLOURS: Final = ("#3b82f6", "#f59e0b", "#10b981", "#ef4444", "#8b5cf6", "#14b8a6", "#ec4899", "#94a3b8")


def page(report: Report) -> str:
    """The whole page."""
    parts = [f"<h1>{escape(report.title)}</h1>", f'<p class="about">{escape(_about(report))}</p>', _verdicts(report)]
    parts += _effects(report)
    if report.kind == "search":
        parts += ["<h2>Trials</h2>", _plots(panels.of_search(report)), _trials(report)]
    elif report.kind != "ablation" and len(report.runs) <= panels.MOST_WHOLE_RUNS:
        for run in report.runs:
            parts += [f"<h2>{escape(_name(report, run))}</h2>", *_notes(run.notes), _plots(panels.of_run(run))]
    else:
        parts += ["<h2>Side by side</h2>", _plots(panels.of_sides(report))]
    figures = "" if report.kind == "search" else _figures(report)
    parts += ["<h2>Figures and facts</h2>", *_notes(report.notes), figures, *_facts(report)]
    colours = "".join(
        f".s{n}{{stroke:{colour}}}.f{n}{{fill:{colour}}}.k{n}{{background:{colour}}}"
        for n, colour in enumerate(_COLOURS)
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width"><link rel="icon" href="data:,">'
        f"<title>{escape(report.title)}</title><style>{_STYLE}{colours}</style></head>"
        f"<body>{''.join(parts)}</body></html>\n"
    )


def _about(report: Report) -> str:
    cpu, cores = report.machine.get("cpu", "?"), report.machine.get("cores", "?")
    version = report.versions.get("inferd", "")
    return f"{report.model} · {report.started_at} · {cpu}, {cores} cores{f' · inferd {version}' if version else ''}"


def _name(report: Report, run: Run) -> str:
    return f"{run.side}, repetition {run.repeat + 1}" if len(report.of(run.side)) > 1 else run.side


def _notes(notes: tuple[str, ...]) -> list[str]:
    return [f'<p class="why">{escape(note)}</p>' for note in notes]


def _plots(plots: list[tuple[str, str]]) -> str:
    figures = [f"<figure><figcaption>{escape(title)}</figcaption>{drawn}</figure>" for title, drawn in plots if drawn]
    return f'<div class="plots">{"".join(figures)}</div>'


def _verdicts(report: Report) -> str:
    if not report.verdicts:
        return ""
    words = {True: '<b class="yes">holds</b>', False: '<b class="no">does not hold</b>', None: "not judged"}
    rows = [
        f'<tr><td>{escape(v.name)}</td><td>{words[v.passed]}</td><td class="words">{escape(v.why)}</td></tr>'
        for v in report.verdicts
    ]
    return f"<h2>Verdict</h2><table>{''.join(rows)}</table>"


def _effects(report: Report) -> list[str]:
    parts: list[str] = []
    for against in dict.fromkeys(effect.against for effect in report.effects):
        chosen = [effect for effect in report.effects if effect.against == against]
        plots = [
            (title, svg.intervals(title, [_interval(e) for e in chosen if e.figure == figure]))
            for figure, title in _FORESTS.items()
        ]
        parts += [f"<h2>Against {escape(against)}</h2>", _plots(plots)]
        parts.append('<p class="why">Ratio of means with its 95 % interval; grey is not significant.</p>')
    return parts


def _interval(effect: Effect) -> svg.Interval:
    tone = "quiet" if effect.noise is not False else "good" if better(effect.figure, effect.ratio) else "bad"
    low, high = effect.low, effect.high
    return svg.Interval(
        effect.side, effect.ratio, effect.ratio if low is None else low, effect.ratio if high is None else high, tone
    )


def _figures(report: Report) -> str:
    """A row a figure, a column a side: means, and how far the repetitions lie apart."""
    names = dict.fromkeys(name for run in report.runs for name in run.figures)
    head = "".join(f"<th>{escape(side)}</th>" for side in report.sides)
    rows = [
        f"<tr><td>{escape(name)}</td>"
        + "".join(f"<td>{_cell(name, report.values(side, name))}</td>" for side in report.sides)
        + "</tr>"
        for name in names
    ]
    return f"<table><tr><th></th>{head}</tr>{''.join(rows)}</table>"


def _trials(report: Report) -> str:
    """A row a trial: its settings, its figures, what became of it."""
    knobs = list(dict.fromkeys(name for run in report.runs for name in run.settings))
    head = "".join(f"<th>{escape(name)}</th>" for name in (*knobs, *_FORESTS))
    rows = [
        f"<tr><td>{escape(run.side)}</td>"
        + "".join(f"<td>{escape(str(run.settings.get(name, '')))}</td>" for name in knobs)
        + "".join(f"<td>{_cell(name, [run.figures[name]] if name in run.figures else [])}</td>" for name in _FORESTS)
        + f'<td class="words">{escape(", ".join(run.notes))}</td></tr>'
        for run in report.runs
    ]
    return f"<table><tr><th></th>{head}<th></th></tr>{''.join(rows)}</table>"


def _cell(name: str, values: list[float]) -> str:
    if not values:
        return "–"
    form = panels.readable if name.endswith("_bytes") else svg.plain
    mean = form(sum(values) / len(values))
    return f"{mean} <small>({form(min(values))} to {form(max(values))})</small>" if len(set(values)) > 1 else mean


def _facts(report: Report) -> list[str]:
    tables: list[tuple[str, dict[str, Any]]] = [
        ("Machine", report.machine),
        ("Versions", report.versions),
        ("Settings", report.settings),
        *((f"Settings: {side}", report.of(side)[0].settings) for side in report.sides if report.kind != "search"),
        ("Seeds", {"seeds": ", ".join(map(str, report.seeds))}),
    ]
    parts = []
    for title, facts in tables:
        rows = [
            f'<tr><td>{escape(str(name))}</td><td class="words">{escape(str(value))}</td></tr>'
            for name, value in facts.items()
            if value not in (None, "", [], ())
        ]
        if rows:
            parts.append(f"<h3>{escape(title)}</h3><table>{''.join(rows)}</table>")
    return parts
