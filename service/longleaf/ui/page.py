"""The page: HTML made here, so that it also reads without scripts; a script renews it."""

import html
import math
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from importlib.resources import files

from longleaf import __version__
from longleaf.ui.samples import Histogram, ratio
from longleaf.ui.state import ContextView, ReplicaView, View
from longleaf.ui.trees import DraftTree, draw

STYLE = files("longleaf.ui").joinpath("style.css").read_text()
SCRIPT = files("longleaf.ui").joinpath("refresh.js").read_text()
_POOL_WIDTH, _SPARK_HEIGHT = 180, 24
_ROWS = 100
"""Replicas on one page."""


def render(view: View, page: int = 1) -> str:
    """The whole document, with the ``page``th hundred of the replicas: those in trouble first."""
    ready = sum(replica.state == "ready" for replica in view.replicas)
    return (
        "<!doctype html><html lang=en><meta charset=utf-8>"
        '<meta name=viewport content="width=device-width, initial-scale=1">'
        "<noscript><meta http-equiv=refresh content=5></noscript>"
        f"<title>Longleaf: {ready} of {len(view.replicas)} ready</title><style>{STYLE}</style>"
        f"<header><h1>Longleaf</h1><span class=note>gateway {html.escape(__version__)}</span>"
        f"<span id=lost hidden></span></header>{_main(view, ready, page)}"
        f"<script>{SCRIPT}</script></html>"
    )


def _main(view: View, ready: int, page: int) -> str:
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(view.at))
    covered = "since each process started"
    if view.window is not None:
        covered = f"over the last {view.window:.0f} s"
    note = f"<p class=note>{at} UTC. Counts and times are {covered}.</p>"
    return (
        f'<main data-at="{view.at:.3f}">{note}'
        f"<h2>Replicas: {ready} of {len(view.replicas)} ready</h2>{_replicas(view.replicas, page)}"
        f"<h2>Admission: {view.queue_depth:.0f} waiting</h2>{_admission(view)}"
        f"<h2>Speculation by context</h2>{_contexts(view.contexts)}"
        f"<h2>Last draft trees</h2>{_trees(view.trees)}</main>"
    )


def _replicas(replicas: Sequence[ReplicaView], page: int) -> str:
    pages = max(1, math.ceil(len(replicas) / _ROWS))
    page = min(max(1, page), pages)
    troubled = sorted(replicas, key=lambda replica: replica.state == "ready")
    shown = troubled[_ROWS * (page - 1) : _ROWS * page]
    return _pages(page, pages) + _replica_table(shown)


def _pages(page: int, pages: int) -> str:
    if pages == 1:
        return ""
    links = [
        f'<a href="?page={number}">{word}</a>'
        for word, number in (("Before", page - 1), ("After", page + 1))
        if 1 <= number <= pages
    ]
    return f"<p class=note>Page {page} of {pages}, not ready first. {' '.join(links)}</p>"


def _replica_table(replicas: Sequence[ReplicaView]) -> str:
    head = ("Replica", "State", "In flight", "KV pool", "Used", "Cached", "Free")
    return _table(
        "replicas",
        (*head, "Reserved", "By others"),
        [
            (
                html.escape(replica.url),
                f'<span class="state-{html.escape(replica.state)}">{html.escape(replica.state)}'
                f"</span>{_why(replica.why)}",
                f"{replica.in_flight}",
                _pool(replica.pool, replica.capacity),
                *(_count(replica.pool.get(name)) for name in ("used", "cached", "free")),
                _count(replica.reserved),
                _count(replica.external),
            )
            for replica in replicas
        ],
        words=(0, 1, 3),
    )


def _why(why: str) -> str:
    return f" <span class=why>{html.escape(why[:200])}</span>" if why else ""


def _pool(pool: Mapping[str, float], capacity: float | None) -> str:
    """A bar of used, cached and free slots; SGLang tells free ones alone, so taken and free."""
    slots = sum(pool.values()) if "used" in pool else capacity
    if not slots or "free" not in pool or min(slots, *pool.values()) < 0:
        return "not told"
    taken = max(0.0, slots - pool["free"])
    widths = {"all": slots, "cached": taken, "used": pool.get("used", 0.0)}
    bars = "".join(
        f'<rect class={name} width="{_POOL_WIDTH * size / slots:.1f}" height="12"/>'
        for name, size in widths.items()
    )
    label = f"{taken / slots:.0%} full"
    return (
        f'<svg class=pool viewBox="0 0 {_POOL_WIDTH} 12" role=img aria-label="{label}">'
        f"<title>{label}</title>{bars}</svg>"
    )


def _admission(view: View) -> str:
    wait = view.queue_wait
    rows = [
        (html.escape(decision), html.escape(reason), _count(amount))
        for (decision, reason), amount in view.decisions.items()
        if amount
    ]
    words = ""
    if wait.count:
        words = (
            f"<p class=note>Waits: {wait.count:.0f}, mean {_milliseconds(wait.mean)}, "
            f"95 of 100 under {_milliseconds(wait.quantile(0.95))}.</p>"
        )
    return words + _table("admission", ("Decision", "Reason", "Requests"), rows, (0, 1))


def _contexts(contexts: Sequence[ContextView]) -> str:
    head = ("Context", "Steps", "commit_len", "Distribution", "Nodes", "Useful")
    return _table(
        "contexts",
        (*head, "Step mean", "Step 95 %", "Time a token"),
        [
            (
                f"up to {context.bucket}" if context.bucket != "inf" else "over 200k",
                _count(context.commit_len.count),
                _mean(context.commit_len.mean, 2),
                _spark(context.commit_len),
                _mean(context.nodes.mean, 1),
                _share(ratio(context.commit_len.mean, context.nodes.mean)),
                _milliseconds(context.step_seconds.mean),
                _milliseconds(context.step_seconds.quantile(0.95)),
                _milliseconds(ratio(context.step_seconds.mean, context.commit_len.mean)),
            )
            for context in contexts
        ],
        words=(0, 3),
    )


def _spark(commits: Histogram) -> str:
    """Bars for commit lengths from 1 on; what is beyond the last bound is the last bar."""
    counts = list(commits.counts)
    while len(counts) > 8 and not counts[-1]:
        counts.pop()
    most = max(counts, default=0.0) or 1.0
    bars = "".join(
        f'<rect x="{index}.1" y="{_SPARK_HEIGHT * (1 - count / most):.2f}" width="0.8" '
        f'height="{_SPARK_HEIGHT * count / most:.2f}">'
        f"<title>{index + 1}: {count:.0f}</title></rect>"
        for index, count in enumerate(counts)
    )
    return (
        f'<svg class=spark viewBox="0 0 {len(counts)} {_SPARK_HEIGHT}" preserveAspectRatio=none '
        f'role=img aria-label="steps by commit_len from 1 on">{bars}</svg>'
    )


def _trees(trees: Sequence[tuple[str, DraftTree]]) -> str:
    if not trees:
        return "<p class=note>None yet, or the replicas do not tell.</p>"
    figures = "".join(
        f"<figure><figcaption>{html.escape(url)}, context {tree.context:,}: {len(tree.parents)} "
        f"nodes, commit_len {tree.commit_len}</figcaption>{draw(tree)}</figure>"
        for url, tree in trees
    )
    note = "Green: the accepted path. Numbers: the drafter's probability of the prefix up to there."
    return f"<p class=note>{note}</p><div class=trees>{figures}</div>"


def _table(
    name: str, head: Iterable[str], rows: Sequence[Sequence[str]], words: Collection[int]
) -> str:
    """Rows are HTML; the columns ``words`` hold no numbers."""
    if not rows:
        return f"<p class=note id={name}>None in that time.</p>"

    def row(cells: Iterable[str], tag: str) -> str:
        return "".join(
            f"<{tag} class=text>{cell}</{tag}>" if column in words else f"<{tag}>{cell}</{tag}>"
            for column, cell in enumerate(cells)
        )

    body = "".join(f"<tr>{row(cells, 'td')}</tr>" for cells in rows)
    top = f"<thead><tr>{row(map(html.escape, head), 'th')}</tr></thead>"
    return f"<div class=wide><table id={name}>{top}<tbody>{body}</tbody></table></div>"


def _count(amount: float | None) -> str:
    return "not told" if amount is None else f"{amount:,.0f}"


def _mean(amount: float, digits: int) -> str:
    return "not told" if math.isnan(amount) else f"{amount:.{digits}f}"


def _share(share: float) -> str:
    return "not told" if math.isnan(share) else f"{share:.0%}"


def _milliseconds(seconds: float) -> str:
    return "not told" if math.isnan(seconds) else f"{1e3 * seconds:,.1f} ms"
