"""What kvtier implements of vLLM and calls in it fits every release from 0.28 to 0.33; none of them is needed here.

``signatures.json`` is made by ``scripts/vllm_signatures.py``. The fixture is compared with kvtier's sources.
"""

import ast
import inspect
import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from scripts.vllm_signatures import CONTRACTS, FIXTURE, Signatures, describe, merge, methods_of, read_source

SOURCES = Path(__file__).parents[3] / "src" / "kvtier" / "engines" / "vllm"
PLUGIN = SOURCES.with_name("vllm_plugin.py")
RELEASES = ("0.28", "0.29", "0.30", "0.31", "0.32", "0.33")
ALL: dict[str, dict[str, str]] = json.loads(FIXTURE.read_text())

CONNECTOR = "vllm.distributed.kv_transfer.kv_connector.v1"
BASE = f"{CONNECTOR}.base:KVConnectorBase_V1"

IMPLEMENTED = {
    ("connector", "KVTierConnector"): (BASE, f"{CONNECTOR}.base:SupportsHMA"),
    ("scheduler_hooks", "SchedulerHooks"): (BASE, f"{CONNECTOR}.base:SupportsHMA"),
    ("worker_hooks", "WorkerHooks"): (BASE, f"{CONNECTOR}.base:SupportsHMA"),
    ("metrics", "KVTierStats"): (f"{CONNECTOR}.metrics:KVConnectorStats",),
    ("metrics", "KVTierPromMetrics"): (f"{CONNECTOR}.metrics:KVConnectorPromMetrics",),
    ("policies", "KVTierPolicy"): ("vllm.v1.kv_offload.cpu.policies.base:CachePolicy",),
    ("tiers", "KVTierSecondaryTier"): ("vllm.v1.kv_offload.tiering.base:SecondaryTierManager",),
}
"""Contracts of vLLM by the file and class of kvtier that implements them."""

KEPT = {
    BASE: {
        "bind_connector_metadata": "vLLM's own bookkeeping",
        "bind_gpu_block_pool": "kvtier looks at no device block",
        "bind_kv_cache_manager": "kvtier reads no device tables",
        "clear_connector_metadata": "vLLM's own bookkeeping",
        "finish_forward": "stores wait for the next step",
        "get_finished_count": "each worker reports to its scheduler half",
        "get_handshake_metadata": "no peer connects to a worker",
        "get_kv_connector_kv_cache_events": "events come from the scheduler half",
        "get_mem_pool_context": "device memory is vLLM's",
        "has_connector_metadata": "vLLM's own bookkeeping",
        "has_pending_block_frees": "a finished request's blocks are never kept",
        "prefer_cross_layer_blocks": "pages of a layer are enough",
        "register_cross_layers_kv_cache": "never offered",
        "register_finished_partial_tail": "states within a block are not kept",
        "requires_piecewise_for_cudagraph": "no hook is called within a graph",
        "reset_capture_state": "without a step's metadata a worker changes nothing",
        "role": "vLLM's own",
        "set_host_xfer_buffer_ops": "for host buffers of vLLM's",
        "set_xfer_handshake_metadata": "no peer connects to a worker",
        "set_xfer_handshake_metadata_pp_aware": "no peer connects to a worker",
        "supports_divergent_local_hybrid_hits": "groups are searched together",
        "supports_sleep_mode": "true by default",
    },
    f"{CONNECTOR}.base:SupportsHMA": {},
    f"{CONNECTOR}.metrics:KVConnectorStats": {"to_dict": "what kvtier reports is plain data"},
    f"{CONNECTOR}.metrics:KVConnectorPromMetrics": {},
    "vllm.v1.kv_offload.cpu.policies.base:CachePolicy": {
        "mark_evictable": "kvtier's policies look at ref_cnt",
        "mark_non_evictable": "kvtier's policies look at ref_cnt",
    },
    "vllm.v1.kv_offload.tiering.base:SecondaryTierManager": {
        "block_size_bytes": "vLLM's own, of the primary's rows",
        "bp_detector": "vLLM's own backpressure",
        "config_info": "no facts beside those of the metrics",
        "config_info_keys": "no facts beside those of the metrics",
        "has_pending_work": "vLLM's manager counts jobs",
        "serve_external_requests": "no peer",
        "take_events": "none: events of tiers come with kvtier's own connector",
    },
}
"""Hooks whose default of vLLM's is right, and why. One that is neither here nor implemented is new: decide."""


def parameters_of(text: str) -> inspect.Signature:
    """Return a signature that ``describe`` has written."""
    text = text.removeprefix("abstract ")
    function = ast.parse(f"def f({text}): ...").body[0]
    assert isinstance(function, ast.FunctionDef)
    arguments, kinds = function.args, inspect.Parameter
    plain = [*arguments.posonlyargs, *arguments.args]
    first_default = len(plain) - len(arguments.defaults)
    found = [
        inspect.Parameter(
            item.arg,
            kinds.POSITIONAL_ONLY if item in arguments.posonlyargs else kinds.POSITIONAL_OR_KEYWORD,
            default=... if idx >= first_default else inspect.Parameter.empty,
        )
        for idx, item in enumerate(plain)
    ]
    if arguments.vararg:
        found.append(inspect.Parameter(arguments.vararg.arg, kinds.VAR_POSITIONAL))
    for item, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        usual = inspect.Parameter.empty if default is None else ...
        found.append(inspect.Parameter(item.arg, kinds.KEYWORD_ONLY, default=usual))
    if arguments.kwarg:
        found.append(inspect.Parameter(arguments.kwarg.arg, kinds.VAR_KEYWORD))
    return inspect.Signature(found)


def misfit(ours: str, theirs: str) -> str | None:
    """Return why a method cannot be called as vLLM may call the one that it implements; None if it can."""
    own, stock = parameters_of(ours), parameters_of(theirs)
    named = [item for item in stock.parameters.values() if item.kind is item.POSITIONAL_OR_KEYWORD]
    only_named = [item for item in stock.parameters.values() if item.kind is item.KEYWORD_ONLY]
    keywords = {item.name: 1 for item in only_named}
    # Where releases name a parameter differently kvtier takes it by its place alone, as vLLM passes it.
    is_by_place = any(item.kind is item.POSITIONAL_ONLY for item in own.parameters.values())
    by_name_alone = {item.name: 1 for item in named[1:]} | keywords
    calls = [
        ([1] * len(named), keywords),
        ([1] * len(named), keywords) if is_by_place else ([1], by_name_alone),
        (
            [1] * sum(item.default is item.empty for item in named),
            {item.name: 1 for item in only_named if item.default is item.empty},
        ),
    ]
    for positional, by_name in calls:
        try:
            own.bind(*positional, **by_name)
        except TypeError as error:
            return f"({ours}) does not take a call of ({theirs}): {error}"
    return None


def in_release(release: str) -> Signatures:
    """Return the signatures of one release."""
    return {
        name: signature
        for name, signatures in ALL.items()
        for signature, releases in signatures.items()
        if release in releases.split()
    }


def methods_in(source: str, class_name: str) -> Signatures:
    """Return the signatures of a class's methods."""
    (node,) = (
        item for item in ast.parse(source).body if isinstance(item, ast.ClassDef) and item.name == class_name
    )
    return {method.name: describe(method.args) for method in methods_of(node)}


def methods_by_contract() -> dict[str, Signatures]:
    """Return kvtier's methods for each contract of vLLM's, over all classes that implement parts of it."""
    methods: dict[str, Signatures] = {}
    for (file, class_name), contracts in IMPLEMENTED.items():
        found = methods_in((SOURCES / f"{file}.py").read_text(), class_name)
        for contract in contracts:
            methods[contract] = methods.get(contract, {}) | found
    return methods


def misfits(release: str, methods: Mapping[str, Signatures]) -> list[str]:
    """Return what of kvtier's implementations does not fit a release: wrong parameters, and missing methods."""
    stock = in_release(release)
    problems = []
    for contract, own in methods.items():
        for full_name, theirs in stock.items():
            place, _, name = full_name.rpartition(".")
            if place != contract:
                continue
            if name not in own:
                if name not in KEPT[contract] or theirs.startswith("abstract "):
                    problems.append(f"{full_name}({theirs}) is not implemented")
            elif reason := misfit(own[name], theirs):
                problems.append(f"{full_name}: {reason}")
    return problems


@pytest.mark.parametrize("release", RELEASES)
def test_every_hook_of_a_release_is_implemented_as_it_is_called_or_left_for_a_reason(release: str) -> None:
    assert misfits(release, methods_by_contract()) == []


def test_the_two_breaks_of_0_33_are_found() -> None:
    methods = methods_by_contract()
    policy = "vllm.v1.kv_offload.cpu.policies.base:CachePolicy"
    methods[BASE]["restore_kv_caches"] = "self, kv_caches"
    methods[policy]["insert"] = "self, key, chunk"

    problems = [problem.partition("(")[0] for problem in misfits("0.33", methods)]

    assert sorted(problems) == [f"{BASE}.restore_kv_caches: ", f"{policy}.insert: "]
    assert misfits("0.32", methods) == []


def test_a_hook_that_a_release_adds_is_not_overlooked() -> None:
    methods = methods_by_contract()
    del methods[BASE]["unregister_kv_caches"]

    assert misfits("0.33", methods) == [f"{BASE}.unregister_kv_caches(self) is not implemented"]


def imports_in(tree: ast.Module) -> dict[str, str]:
    """Return where each name that is imported from vLLM comes from: a module, or ``module:name``."""
    origin: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vllm"):
            for item in node.names:
                inner = f"{node.module}.{item.name}"
                known = inner if inner in CONTRACTS else f"{node.module}:{item.name}"
                origin[item.asname or item.name] = known
    return origin


def calls_in(path: Path) -> Iterator[tuple[str, ast.Call]]:
    """Yield each call of a name that the file imports from vLLM, with the name's module."""
    tree = ast.parse(path.read_text())
    origin = imports_in(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            owner, _, name = ast.unparse(node.func).rpartition(".")
            if owner in origin and origin[owner] in CONTRACTS:
                yield f"{origin[owner]}:{name}", node
            elif ":" in origin.get(owner, ""):
                yield f"{origin[owner]}.{name}", node
            elif name in origin and not owner:
                yield origin[name], node


def refused_calls(path: Path, release: str) -> list[str]:
    """Return the calls of a file that a release would refuse."""
    stock, refused = in_release(release), []
    for name, call in calls_in(path):
        if name not in stock:
            continue
        signature = parameters_of(stock[name])
        instance = [1] if {"self", "cls"} & set(signature.parameters) else []
        named = {keyword.arg: 1 for keyword in call.keywords if keyword.arg}
        is_open = any(keyword.arg is None for keyword in call.keywords)
        try:
            (signature.bind_partial if is_open else signature.bind)(
                *instance, *[1 for _ in call.args], **named
            )
        except TypeError as error:
            refused.append(f"{path.name}:{call.lineno}: {ast.unparse(call)[:80]}: {error}")
    return refused


@pytest.mark.parametrize("release", RELEASES)
def test_a_release_takes_what_kvtier_calls_in_it(release: str) -> None:
    paths = [PLUGIN, *sorted(SOURCES.glob("*.py"))]

    assert [call for path in paths for call in refused_calls(path, release)] == []


def test_calls_are_found_by_name_through_their_module_and_through_their_class() -> None:
    names = {name.partition(":")[2] for path in [PLUGIN, *SOURCES.glob("*.py")] for name, _ in calls_in(path)}

    assert {
        "BlockStored",
        "BlockRemoved",
        "hash_block_tokens",
        "JobResult",
        "RequestOffloadingContext",
        "KVConnectorFactory.register_connector",
        "SecondaryTierFactory.register_tier",
        "CachePolicyFactory.register_cache_policy",
    } <= names


def test_the_fixture_has_every_release_and_contract() -> None:
    found = {
        release for signatures in ALL.values() for text in signatures.values() for release in text.split()
    }
    wanted = {f"{module}:{name}" for module, names in CONTRACTS.items() for name in names}

    assert found == set(RELEASES)
    assert wanted <= set(ALL)


def test_signatures_are_read_from_sources_without_types_and_values() -> None:
    source = """
class Fields:
    kind: ClassVar[str] = "x"
    a: int
    b: int = 3

class Child(Fields):
    c: int = 4

    @abstractmethod
    def insert(self, key: str, *, size: int = 2, **more: object) -> None: ...

    def _own(self): ...

def function(a, b=1): ...
"""

    assert read_source(source, ("Child", "function"), "m:") == {
        "m:Child": "self, a, b=..., c=...",
        "m:Child.insert": "abstract self, key, *, size=..., **more",
        "m:function": "a, b=...",
    }


def test_releases_with_one_signature_share_a_line() -> None:
    assert merge({"0.9": {"f": "a"}, "0.10": {"f": "a"}, "0.11": {"f": "a, b"}}) == {
        "f": {"a": "0.9 0.10", "a, b": "0.11"}
    }
