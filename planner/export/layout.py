"""A layered layout: boxes in rows, each below what it follows, few crossings, straight lines, no overlaps.

The steps are those of Sugiyama, Tagawa and Toda (1981): rows by the longest path, orders by barycentres, and then
the places that are nearest to the mean of a box's neighbours and keep the distances.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import networkx as nx

SWEEPS = 12
"""Times that the rows are gone through, down and up in turn."""


class Bend(NamedTuple):
    """The place in a row where an edge that is longer than one row passes through it."""

    source: Hashable
    target: Hashable
    row: int


@dataclass(frozen=True)
class Rect:
    """A box; (x, y) is its top left corner."""

    x: float
    y: float
    w: float
    h: float

    @property
    def middle(self) -> float:
        """Where its vertical axis is."""
        return self.x + self.w / 2

    @property
    def bottom(self) -> float:
        """Where its lower edge is."""
        return self.y + self.h


@dataclass(frozen=True)
class Layout:
    """Where everything is. The picture's top left corner is the origin."""

    boxes: Mapping[Hashable, Rect]
    routes: Mapping[tuple[Hashable, Hashable], tuple[tuple[float, float], ...]]
    """Edge -> points in pairs: it leaves the first of a pair downwards and arrives at the second from above."""
    width: float
    height: float


@dataclass(frozen=True)
class Sizes:
    """Measures of a layout."""

    box_w: float
    box_h: float
    gap_x: float = 26.0
    gap_y: float = 58.0
    bend_w: float = 8.0

    def width(self, item: Hashable) -> float:
        """Of a box or a bend."""
        return self.bend_w if isinstance(item, Bend) else self.box_w


def layered(graph: nx.DiGraph, sizes: Sizes) -> Layout:
    """Lay out an acyclic graph from the top down."""
    if graph.number_of_nodes() == 0:
        return Layout({}, {}, 0.0, 0.0)
    chains = _chains(graph, _rows_of(graph))
    fine, rows = _split(graph, chains)
    rows = _ordered(fine, rows)
    middle = _places(fine, rows, sizes)
    return _result(fine, rows, middle, chains, sizes)


def _rows_of(graph: nx.DiGraph) -> dict[Hashable, int]:
    """Row by the longest path; what follows nothing stands just above the first that follows it."""
    row: dict[Hashable, int] = {}
    for node in nx.topological_sort(graph):
        row[node] = 1 + max((row[p] for p in graph.predecessors(node)), default=-1)
    for node in graph:
        below = [row[s] for s in graph.successors(node)]
        if below and graph.in_degree(node) == 0:
            row[node] = min(below) - 1
    return row


def _chains(graph: nx.DiGraph, row: Mapping[Hashable, int]) -> dict[tuple[Hashable, Hashable], list[Hashable]]:
    """Edge -> its two ends with the bends between them."""
    return {(s, t): [s, *(Bend(s, t, r) for r in range(row[s] + 1, row[t])), t] for s, t in graph.edges}


def _split(graph: nx.DiGraph, chains: Mapping[tuple[Hashable, Hashable], list[Hashable]]) -> tuple[nx.DiGraph, list]:
    """The graph whose edges all go from one row to the next, and its rows."""
    row = _rows_of(graph)
    fine = nx.DiGraph()
    fine.add_nodes_from(graph)
    for chain in chains.values():
        nx.add_path(fine, chain)
    rows: list[list[Hashable]] = [[] for _ in range(max(row.values()) + 1)]
    # Depth first, so that what belongs together begins side by side. A graph of its own: a view goes by hashes.
    both_ways = nx.Graph(fine.edges)
    for item in nx.dfs_preorder_nodes(both_ways) if len(fine) > 1 and nx.is_weakly_connected(fine) else fine:
        rows[item.row if isinstance(item, Bend) else row[item]].append(item)
    return fine, rows


def _ordered(fine: nx.DiGraph, rows: list[list[Hashable]]) -> list[list[Hashable]]:
    """The orders with the fewest crossings among those that the sweeps come to."""
    best, fewest = [list(r) for r in rows], _crossings(fine, rows)
    for sweep in range(SWEEPS):
        if fewest == 0:
            break
        down = sweep % 2 == 0
        for upper, lower in pairwise(rows) if down else pairwise(rows[::-1]):
            position = {item: i for i, item in enumerate(upper)}
            neighbours = fine.predecessors if down else fine.successors
            weight = {item: _mean([position[n] for n in neighbours(item)], i) for i, item in enumerate(lower)}
            lower.sort(key=weight.__getitem__)
        count = _crossings(fine, rows)
        if count < fewest:
            best, fewest = [list(r) for r in rows], count
    return best


def _mean(values: Sequence[float], otherwise: float) -> float:
    return sum(values) / len(values) if values else otherwise


def _crossings(fine: nx.DiGraph, rows: Sequence[Sequence[Hashable]]) -> int:
    """Pairs of edges between neighbouring rows that cross."""
    count = 0
    for upper, lower in pairwise(rows):
        position = {item: i for i, item in enumerate(lower)}
        seen: list[int] = []
        for item in upper:
            ends = sorted(position[s] for s in fine.successors(item))
            count += sum(len(seen) - bisect_left(seen, end + 1) for end in ends)
            for end in ends:
                insort(seen, end)
    return count


def _places(fine: nx.DiGraph, rows: Sequence[Sequence[Hashable]], sizes: Sizes) -> dict[Hashable, float]:
    """Middles of all items, the leftmost edge at 0."""
    middle: dict[Hashable, float] = {}
    for row in rows:
        middle.update(zip(row, _apart([0.0] * len(row), row, sizes), strict=True))
    for sweep in range(SWEEPS):
        for row in rows if sweep % 2 == 0 else rows[::-1]:
            near = [list(_neighbours(fine, item, sweep)) for item in row]
            wanted = [_mean([middle[n] for n in ns], middle[item]) for ns, item in zip(near, row, strict=True)]
            middle.update(zip(row, _apart(wanted, row, sizes), strict=True))
    left = min(x - sizes.width(item) / 2 for item, x in middle.items())
    return {item: round(x - left, 2) for item, x in middle.items()}


def _neighbours(fine: nx.DiGraph, item: Hashable, sweep: int) -> Iterator[Hashable]:
    """The row before in the first sweeps, both rows in the last ones."""
    if sweep % 2 == 0 or sweep >= SWEEPS - 4:
        yield from fine.predecessors(item)
    if sweep % 2 == 1 or sweep >= SWEEPS - 4:
        yield from fine.successors(item)


def _apart(wanted: Sequence[float], row: Sequence[Hashable], sizes: Sizes) -> list[float]:
    """The middles nearest to the wanted ones, by least squares, that keep the order and the gaps."""
    offset = [0.0]
    for a, b in pairwise(row):
        offset.append(offset[-1] + (sizes.width(a) + sizes.width(b)) / 2 + sizes.gap_x)
    pools: list[tuple[float, int]] = []
    for place, shift in zip(wanted, offset, strict=True):
        total, count = place - shift, 1
        while pools and pools[-1][0] / pools[-1][1] > total / count:
            more = pools.pop()
            total, count = total + more[0], count + more[1]
        pools.append((total, count))
    level = [total / count for total, count in pools for _ in range(count)]
    return [x + shift for x, shift in zip(level, offset, strict=True)]


def _result(
    fine: nx.DiGraph,
    rows: Sequence[Sequence[Hashable]],
    middle: Mapping[Hashable, float],
    chains: Mapping[tuple[Hashable, Hashable], list[Hashable]],
    sizes: Sizes,
) -> Layout:
    all_items = {
        item: Rect(
            middle[item] - sizes.width(item) / 2, i * (sizes.box_h + sizes.gap_y), sizes.width(item), sizes.box_h
        )
        for i, row in enumerate(rows)
        for item in row
    }
    routes = {}
    for edge, chain in chains.items():
        points = []
        for above, below in pairwise(chain):
            points.append((_port(fine.successors, above, below, middle, sizes), all_items[above].bottom))
            points.append((_port(fine.predecessors, below, above, middle, sizes), all_items[below].y))
        routes[edge] = tuple(points)
    boxes = {item: box for item, box in all_items.items() if not isinstance(item, Bend)}
    width = max(box.x + box.w for box in all_items.values())
    return Layout(boxes, routes, width, max(box.bottom for box in all_items.values()))


def _port(neighbours, item: Hashable, other: Hashable, middle: Mapping[Hashable, float], sizes: Sizes) -> float:
    """Where the edge to `other` meets `item`: side by side with the item's other edges, in the order of their ends."""
    if isinstance(item, Bend):
        return middle[item]
    ends = sorted(neighbours(item), key=middle.__getitem__)
    step = min(24.0, (sizes.box_w - 24) / len(ends))
    return middle[item] + (ends.index(other) - (len(ends) - 1) / 2) * step
