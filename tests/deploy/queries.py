"""The queries of the dashboard, as Grafana sends them."""

from importlib.util import find_spec

from scripts.dashboard import ROWS, Query, expression_of

QUERIES = [query for panels in ROWS.values() for panel in panels for query in panel.queries]

HAS_RECORDS = find_spec("kvtier.connector.request_records") is not None

AWAITED = (
    set() if HAS_RECORDS else {"kvtier_prompt_tokens", "kvtier_missed_tokens", "kvtier_counted_requests"}
)
"""Families that no engine fills before the connector records where prompts come from."""

PRESENT = {"$__rate_interval": "1m", '"$instance"': '".*"'}
"""What Grafana fills in."""


def as_asked(query: Query) -> str:
    """Return a query as Grafana sends it."""
    text = expression_of(query.text)
    for variable, value in PRESENT.items():
        text = text.replace(variable, value)
    return text


ASKED = [as_asked(query) for query in QUERIES if not any(name in query.text for name in AWAITED)]
"""Each query that has data."""
