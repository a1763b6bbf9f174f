"""What README tells a stranger to run is what the Makefile has and what a machine runs before a change lands."""

import re
from pathlib import Path

import pytest

from benchmarks.suites import SUITES

ROOT = Path(__file__).parents[2]
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
README = (ROOT / "README.md").read_text(encoding="utf-8")
CI = (ROOT / ".ci" / "run").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "target",
    [
        "demo",
        "test",
        "test-all",
        "storm",
        "mutants",
        "test-vllm",
        "test-sglang",
        "check",
        "bench",
        "docs",
        "venv",
        "wheel",
        "clean",
        "help",
    ],
)
def test_the_makefile_has_the_target(target: str) -> None:
    assert re.search(rf"^{target}:", MAKEFILE, flags=re.MULTILINE)


@pytest.mark.parametrize("target", ["demo", "test", "test-all", "storm", "mutants", "check", "bench", "docs"])
def test_the_target_makes_its_environment(target: str) -> None:
    assert re.search(rf"^{target}: \$\((DEMO_)?STAMP\)", MAKEFILE, flags=re.MULTILINE)


def test_readme_s_commands_are_targets() -> None:
    commands = re.findall(r"^make (\w+)", README, flags=re.MULTILINE)

    assert commands[:2] == ["demo", "test"]
    assert all(re.search(rf"^{command}:", MAKEFILE, flags=re.MULTILINE) for command in commands)


def test_the_machine_runs_every_test_a_storm_the_checks_the_documents_and_real_engines() -> None:
    commands = re.findall(
        r"""^timed '.*' (?:make (.*)|sh -c "\$\(twice ([\w-]+).*\)")$""", CI, flags=re.MULTILINE
    )

    faults = ["sanitize", "crash ARGS='--kills 100'"]
    engines = ["test-sglang", "test-vllm"]
    assert [once or twice for once, twice in commands] == ["test-all", *faults, *engines]
    assert re.findall(r"^start_beside (.*)$", CI, flags=re.MULTILINE) == [
        "dependencies",
        "check site",
        "storm ARGS='--minutes 1 --summary'",
    ]


def test_what_runs_beside_is_waited_for_before_anything_that_needs_it_or_both_cores() -> None:
    steps = re.findall(
        r"^(?:(start_beside [^(].*|end_beside)|timed '(.*)' (?:make|sh).*)$", CI, flags=re.MULTILINE
    )

    assert [(beside or timed).partition(" ARGS")[0] for beside, timed in steps] == [
        "start_beside dependencies",
        "end_beside",
        "make test-all, what has not passed there",
        "start_beside check site",
        "make sanitize",
        "make crash",
        "end_beside",
        "start_beside storm",
        "make test-sglang",
        "end_beside",
        "make test-vllm",
    ]


def test_the_packages_of_others_need_no_compiler_and_leave_what_is_compiled_alone() -> None:
    recipes = re.findall(r"^\$\((?:\w+_)?DEPENDENCIES\):.*\n((?:\t.*\n)+)", MAKEFILE, flags=re.MULTILINE)

    assert len(recipes) == 4
    assert not [recipe for recipe in recipes if " -e " in recipe or "FORGET_COMPILED" in recipe]


def test_the_machine_runs_readme_s_commands_on_a_bare_debian_before_it_installs_what_newcomers_lack() -> None:
    demo, tests = "timed_there 'make demo' 'make demo'", "$(twice test '--passed-to=/srv/out/passed')"
    bare = CI.index(demo)

    # The three are in the bare Debian too.
    installed = re.findall(r"install_packages (\w+)|packages\+=\(([\w-]+)\)", CI[:bare])
    assert [one or other for one, other in installed] == ["make", "python3", "python3-venv", "mmdebstrap"]
    assert bare < CI.index(tests) < CI.index("packages+=(libnuma1)") < CI.index("$(twice test-all ")


def test_the_machine_s_script_can_be_executed() -> None:
    assert (ROOT / ".ci" / "run").stat().st_mode & 0o111


def test_a_push_and_a_pull_request_run_the_machine_s_script() -> None:
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8")

    assert re.findall(r"^      - run: (.*)$", workflow, flags=re.MULTILINE) == [".ci/run"]
    assert re.search(r"^on:\n  push:\n  pull_request:\n", workflow, flags=re.MULTILINE)


def test_make_bench_runs_the_suites_and_peers_have_an_environment_of_their_own() -> None:
    assert re.search(r"^bench: \$\(STAMP\).*\n\t\$\(BIN\)/kvtier bench", MAKEFILE, flags=re.MULTILINE)
    assert re.search(
        r"^bench-peers: \$\(PEERS_STAMP\).*\n\t\$\(VLLM_BIN\)/kvtier bench", MAKEFILE, flags=re.MULTILINE
    )


def test_every_benchmark_is_a_suite() -> None:
    folder = ROOT / "benchmarks"
    measuring = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for path in folder.rglob("*.py")
        if re.search(r"^def measure\(options: Options\)", path.read_text("utf-8"), flags=re.MULTILINE)
    }
    chained = {
        name
        for name in measuring
        if name.startswith(("benchmarks.engine.", "benchmarks.vllm.", "benchmarks.tiers."))
    }

    assert measuring - chained <= {suite.module for suite in SUITES}
    assert {"benchmarks.engine.suite", "benchmarks.vllm.suite", "benchmarks.tiers.suite"} <= {
        suite.module for suite in SUITES
    }
