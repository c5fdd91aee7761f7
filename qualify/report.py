"""How does a person read a result? One page by itself: verdict, plots, every figure, and what was not measured.

Of two servers each figure has two columns. The plots are matplotlib's, drawn into the page as SVG.
"""

from __future__ import annotations

import html
import io
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from qualify.probe import Plot, Probe

_MOST_LISTED = 40  # of a list's items in the table of figures; the JSON has all
_STYLE = """
:root { color-scheme: light dark; --line: #8884; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; width: 100%; } th, td { border-top: 1px solid var(--line); padding: .2rem .6rem;
text-align: left; vertical-align: top; overflow-wrap: anywhere; } td.n { font-variant-numeric: tabular-nums; }
.passed { color: #2a7d2a; } .fault { color: #c22; } .unproven { color: #a60; }
figure { margin: 1rem 0; background: #fff; } figure svg { width: 100%; height: auto; }
"""


def write_report(path: Path, probe: Probe, summaries: Sequence[Mapping[str, Any]]) -> None:
    """`summaries`: of one server or of two."""
    path.write_text(page(probe, summaries), encoding="utf-8")


def page(probe: Probe, summaries: Sequence[Mapping[str, Any]]) -> str:
    names = [server_name(summary, i, len(summaries)) for i, summary in enumerate(summaries)]
    parts = [f"<h1>qualify {probe.name}</h1>", f"<p>{html.escape(_first_sentence(probe.description))}</p>"]
    for name, summary in zip(names, summaries, strict=True):
        verdict = summary["verdict"]
        parts.append(
            f"<p><b>{html.escape(name)}</b>: <b class={verdict}>{verdict}</b>"
            f" ({html.escape(str(summary['model']))} at {html.escape(summary['url'])}, run {summary['run']})</p>"
        )
        parts.append(f"<pre>{html.escape(chr(10).join(probe.table(dict(summary))))}</pre>")
    for plot in _together([probe.plots(dict(summary)) for summary in summaries], names):
        parts.append(f"<figure>{draw(plot)}</figure>")
    parts.append("<h2>What was not measured</h2><ul>")
    for name, summary in zip(names, summaries, strict=True):
        parts += [f"<li>{html.escape(name)}: {html.escape(text)}</li>" for text in summary["not_measured"]]
    if not any(summary["not_measured"] for summary in summaries):
        parts.append("<li>Nothing that this probe asks for was left out.</li>")
    parts += ["</ul><h2>All figures</h2>", _figures(summaries, names)]
    title = f"<title>qualify {probe.name}</title>"
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width">{title}'
    return f"<!doctype html><html><head>{head}<style>{_STYLE}</style></head><body>{''.join(parts)}</body></html>\n"


def server_name(summary: Mapping[str, Any], place: int, count: int) -> str:
    return summary["url"] if count == 1 else f"{'AB'[place]}: {summary['url']}"


def draw(plot: Plot) -> str:
    """SVG."""
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.6), layout="constrained")
    FigureCanvasSVG(figure)
    axes = figure.add_subplot()
    places = list(range(len(plot.x)))
    numeric = all(isinstance(x, int | float) for x in plot.x)
    for number, (name, values) in enumerate(plot.series.items()):
        if plot.bars or not numeric:
            width = 0.8 / max(len(plot.series), 1)
            at = [place + (number - (len(plot.series) - 1) / 2) * width for place in places]
            axes.bar(at, [0 if v is None else v for v in values], width, label=name)
        else:
            axes.plot(plot.x, [float("nan") if v is None else v for v in values], "o-", label=name)
    if plot.bars or not numeric:
        axes.set_xticks(places, [str(x) for x in plot.x], rotation=20, ha="right")
    axes.set(title=plot.title, xlabel=plot.x_label, ylabel=plot.y_label)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    out = io.StringIO()
    figure.savefig(out, format="svg")
    text = out.getvalue()
    return text[text.index("<svg") :]


def _together(plots: Sequence[Sequence[Plot]], names: Sequence[str]) -> Iterator[Plot]:
    """The same plot of both servers becomes one, where its places are the same."""
    if len(plots) == 1:
        yield from plots[0]
        return
    for one in plots[0]:
        other = next((p for p in plots[1] if p.title == one.title and list(p.x) == list(one.x)), None)
        series = {f"{name} {names[0][:1]}": values for name, values in one.series.items()}
        if other is not None:
            series |= {f"{name} {names[1][:1]}": values for name, values in other.series.items()}
        yield Plot(one.title, one.x_label, one.y_label, one.x, series, one.bars)
    titles = {plot.title for plot in plots[0]}
    yield from (plot for plot in plots[1] if plot.title not in titles)


def _figures(summaries: Sequence[Mapping[str, Any]], names: Sequence[str]) -> str:
    flat = [dict(_flat(summary)) for summary in summaries]
    keys = list(dict.fromkeys(key for values in flat for key in values))
    head = "".join(f"<th>{html.escape(name)}</th>" for name in names)
    rows = []
    for key in keys:
        cells = "".join(f"<td class=n>{html.escape(_shown(values.get(key)))}</td>" for values in flat)
        rows.append(f"<tr><td>{html.escape(key)}</td>{cells}</tr>")
    return f"<table><tr><th></th>{head}</tr>{''.join(rows)}</table>"


def _flat(value: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _flat(inner, f"{place}.{key}" if place else str(key))
    elif isinstance(value, list) and value and isinstance(value[0], Mapping):
        for number, inner in enumerate(value[:_MOST_LISTED]):
            yield from _flat(inner, f"{place}.{number}")
    else:
        yield place, value


def _shown(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        return ", ".join(map(_shown, value[:_MOST_LISTED])) or "–"
    return str(value)


def _first_sentence(text: str | None) -> str:
    return (text or "").strip().partition("\n\n")[0].replace("\n", " ")
