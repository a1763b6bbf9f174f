"""What an audit says, read from an engine's numbers: how many blocks were right, and what a loaded token saves."""

from collections.abc import Mapping
from math import inf

from kvtier.connector.control_arm import SavedInterval
from kvtier.observe.why import Finding

LOADED = "audit.loaded_requests."


def read_saved(numbers: Mapping[str, float]) -> list[SavedInterval]:
    """Return what a loaded token saves, by tier and length; empty without an audit. Pure."""
    found = []
    for name, num_loaded in numbers.items():
        if not name.startswith(LOADED):
            continue
        label = name.removeprefix(LOADED)
        length, _, tier = label.partition(".")
        found.append(
            SavedInterval(
                tier,
                int(length),
                numbers.get(f"audit.saved_s.mean.{label}", 0.0),
                numbers.get(f"audit.saved_s.low.{label}", -inf),
                numbers.get(f"audit.saved_s.high.{label}", inf),
                int(num_loaded),
                int(numbers.get(f"audit.computed_requests.{label}", 0.0)),
                bool(numbers.get(f"audit.switched_off.{label}", 0.0)),
            )
        )
    return sorted(found)


def describe_saved(saved: SavedInterval) -> str:
    """Return what a loaded token saves in milliseconds for a thousand tokens, as text. Pure."""
    if saved.high_s == inf:
        return "not known yet"
    # Seconds a token are milliseconds for a thousand of them, times a million.
    mean, low, high = (f"{1e6 * each:,.3g}" for each in (saved.mean_s, saved.low_s, saved.high_s))
    return f"{mean} ms ({low} to {high})"


def explain_audit(numbers: Mapping[str, float]) -> list[Finding]:
    """Return what an operator must know: wrong blocks, loads that are stopped, tiers that cost time. Pure."""
    found = []
    num_wrong = int(numbers.get("audit.wrong_blocks", 0.0))
    if numbers.get("audit.loads_stopped"):
        text = (
            f"Nothing is loaded: the audit has found {num_wrong:,} blocks with wrong bytes. The log names them. Find "
            "out what wrote them, purge the places, then restart or run kvtier audit --resume."
        )
        found.append(Finding("loads_stopped", text))
    elif num_wrong:
        text = (
            f"The audit has found {num_wrong:,} blocks with wrong bytes and dropped them; more than audit_limit of "
            "them stop every load. The log names them."
        )
        found.append(Finding("wrong_blocks", text))
    for saved in read_saved(numbers):
        if saved.high_s < 0:
            text = (
                f"Hits of {saved.length:,} tokens or more in {saved.tier} are slower to load than to compute: a "
                f'thousand tokens save {describe_saved(saved)}. With "load_if": "faster" they are computed.'
            )
            found.append(Finding(f"{saved.tier}_slower_than_computing", text))
    return found
