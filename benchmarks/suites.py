"""The benchmarks by name."""

from benchmarks.harness.suite import Suite

SUITES = (
    Suite(
        "manager",
        "the primary tier's manager, per block, against a bare ordered dictionary",
        "benchmarks.manager",
        x_label="blocks",
    ),
    Suite("transfer", "device <-> primary, against a plain copy of the same bytes", "benchmarks.transfer"),
    Suite("fs", "puts and gets of the fs tier, against raw calls on one file", "benchmarks.fs"),
    Suite(
        "encryption",
        "puts and gets of the fs tier with encryption, against the same without",
        "benchmarks.encryption",
    ),
    Suite(
        "tiers",
        "puts and gets of the valkey, obj and mooncake tiers, against the plain clients",
        "benchmarks.tiers.suite",
    ),
    Suite(
        "engine",
        "the embedded engine: first tokens, no hits, a step's scheduler side",
        "benchmarks.engine.suite",
    ),
    Suite("vllm", "real vLLM engines: first tokens, no hits", "benchmarks.vllm.suite"),
    Suite(
        "growth-blocks",
        "time per block of the manager's tables as they grow, and the growth",
        "benchmarks.growth.blocks",
        "blocks",
    ),
    Suite(
        "growth-tiers",
        "time per block of searches and stores, by tiers, and its growth",
        "benchmarks.growth.tiers",
        "tiers",
    ),
    Suite(
        "growth-requests",
        "time per request of an idle step, by requests, and its growth",
        "benchmarks.growth.requests",
        "requests",
    ),
)


def find_suite(name: str) -> Suite:
    """Return the suite of that name.

    Raises:
        KeyError: it does not exist; the message lists the suites.
    """
    for suite in SUITES:
        if suite.name == name:
            return suite
    known = ", ".join(suite.name for suite in SUITES)
    raise KeyError(f"no benchmark {name!r}: choose among {known}")
