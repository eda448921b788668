"""A profile as a picture: what messages took and the lines fitted to them, and what collectives took beside that."""

from __future__ import annotations

from typing import Any

from towpath.planner.profile import Profile, collective_seconds
from towpath.train.report import color, standalone_svg

_LINKS = ("inter, one", "inter, all", "intra, one", "intra, all")


def drawn(profile: Profile) -> str:
    return standalone_svg(_draw, profile, (10, 4.8))


def _draw(figure: Any, profile: Profile) -> None:
    links, routes = figure.subplots(1, 2)
    _draw_links(links, profile)
    _draw_routes(routes, profile)
    for axes in (links, routes):
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlabel("bytes")
        axes.set_ylabel("seconds")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25, linewidth=0.6)
        axes.legend(frameon=False, fontsize=7, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.14))


def _draw_links(axes: Any, profile: Profile) -> None:
    axes.set_title("messages: points measured, lines fitted")
    for number, what in enumerate(what for what in _LINKS if profile.has(what)):
        points, fit = profile.of(what), profile.fit(what)
        sizes = [point.size for point in points]
        usual = [point.usual for point in points]
        spread = [[u - min(p.seconds) for u, p in zip(usual, points, strict=True)]]
        spread.append([max(p.seconds) - u for u, p in zip(usual, points, strict=True)])
        axes.errorbar(sizes, usual, yerr=spread, fmt="o", markersize=3, color=color(number), linewidth=0.8)
        fitted = [fit.latency + size / fit.rate for size in sizes]
        axes.plot(sizes, fitted, color=color(number), linewidth=1.2, label=f"{what} (within {fit.error:.0%})")


def _draw_routes(axes: Any, profile: Profile) -> None:
    axes.set_title("collectives: points measured, lines from messages")
    for number, what in enumerate(dict.fromkeys(point.what for point in profile.routes())):
        points = profile.of(what)
        sizes = [point.size for point in points]
        axes.plot(sizes, [point.usual for point in points], "o", markersize=3, color=color(number))
        foretold = [collective_seconds(profile, point) for point in points]
        axes.plot(sizes, foretold, color=color(number), linewidth=1.0, label=what)
