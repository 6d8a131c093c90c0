"""Task graph -> GraphML, for yEd, Gephi, Cytoscape and networkx."""

from __future__ import annotations

import networkx as nx

from planner.export.order import attributed
from planner.graph import TaskGraph


def graphml(graph: TaskGraph) -> str:
    """All tasks and edges, read back by `networkx.parse_graphml`."""
    return "\n".join(nx.generate_graphml(attributed(graph), named_key_ids=True)) + "\n"
