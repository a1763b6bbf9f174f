"""The queries of the dashboard, as Grafana sends them."""

from scripts.dashboard import ROWS, Query, expression_of

QUERIES = [query for panels in ROWS.values() for panel in panels for query in panel.queries]

PRESENT = {"$__rate_interval": "1m", '"$instance"': '".*"'}
"""What Grafana fills in."""


def as_asked(query: Query) -> str:
    """Return a query as Grafana sends it."""
    text = expression_of(query.text)
    for variable, value in PRESENT.items():
        text = text.replace(variable, value)
    return text


ASKED = [as_asked(query) for query in QUERIES]
"""Each query."""
