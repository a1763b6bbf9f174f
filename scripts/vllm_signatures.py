"""Writes `tests/engines/vllm/signatures.json`: the signatures that kvtier implements or calls, in each release of vLLM.

The file has names of parameters and whether they have a default, nothing of vLLM's code. A test compares kvtier's own
methods and calls with it, so that a release which nobody here can install is checked all the same. Wheels are read and
never imported:

    pip download vllm==0.33.0 --no-deps --only-binary=:all: --dest wheels
    python -m scripts.vllm_signatures wheels
"""

import argparse
import ast
import json
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

FIXTURE = Path(__file__).resolve().parent.parent / "tests" / "engines" / "vllm" / "signatures.json"

CONNECTOR = "vllm.distributed.kv_transfer.kv_connector"

CONTRACTS: Mapping[str, Sequence[str]] = {
    f"{CONNECTOR}.factory": ("KVConnectorFactory",),
    f"{CONNECTOR}.v1.base": ("KVConnectorBase_V1", "SupportsHMA", "KVConnectorTransferResults"),
    f"{CONNECTOR}.v1.metrics": ("KVConnectorStats", "KVConnectorPromMetrics"),
    f"{CONNECTOR}.v1.offloading.metrics": ("OffloadingConnectorStats",),
    "vllm.distributed.kv_events": ("BlockStored", "BlockRemoved"),
    "vllm.v1.core.kv_cache_utils": (
        "hash_block_tokens",
        "maybe_convert_block_hash",
        "resolve_kv_cache_block_sizes",
        "resolve_none_hash_seed",
    ),
    "vllm.utils.hashing": ("get_hash_fn_by_name",),
    "vllm.v1.kv_offload.base": (
        "OffloadingCounterMetadata",
        "OffloadingGaugeMetadata",
        "OffloadingHistogramMetadata",
        "OffloadingMetricMetadata",
        "ReqContext",
        "RequestOffloadingContext",
        "ScheduleEndContext",
    ),
    "vllm.v1.kv_offload.cpu.policies.base": ("CachePolicy",),
    "vllm.v1.kv_offload.cpu.policies.factory": ("CachePolicyFactory",),
    "vllm.v1.kv_offload.tiering.base": ("JobResult", "SecondaryTierManager"),
    "vllm.v1.kv_offload.tiering.factory": ("SecondaryTierFactory",),
}
"""Names that kvtier inherits from or calls, by module."""

Signatures = dict[str, str]
"""A signature by ``Class.method``, ``Class`` (what its constructor takes) or ``function``."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the file anew from the wheels in a folder."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="has a wheel of each release, at any depth")
    folder = parser.parse_args(arguments).folder
    wheels = {wheel.name.split("-")[1]: wheel for wheel in sorted(folder.rglob("vllm-*.whl"))}
    if not wheels:
        parser.error(f"{folder} has no wheel named vllm-*.whl: see above for how to get one")
    found = {".".join(version.split(".")[:2]): read_wheel(wheel) for version, wheel in wheels.items()}
    FIXTURE.write_text(json.dumps(merge(found), indent=1, sort_keys=True) + "\n")


def read_wheel(wheel: Path) -> Signatures:
    """Return the signatures of the contracts in one wheel."""
    signatures: Signatures = {}
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        for module, wanted in CONTRACTS.items():
            path = module.replace(".", "/") + ".py"
            if path in names:
                signatures |= read_source(archive.read(path).decode(), wanted, f"{module}:")
    return signatures


def read_source(source: str, wanted: Sequence[str], prefix: str = "") -> Signatures:
    """Return the signatures of some classes and functions of a module. Pure.

    Args:
        source: the module's text.
        wanted: names of its classes and functions.
        prefix: in front of each name in the result.
    """
    body = ast.parse(source).body
    classes = {node.name: node for node in body if isinstance(node, ast.ClassDef)}
    signatures: Signatures = {}
    for node in body:
        if isinstance(node, ast.FunctionDef) and node.name in wanted:
            signatures[prefix + node.name] = describe(node.args)
        elif isinstance(node, ast.ClassDef) and node.name in wanted:
            signatures[prefix + node.name] = describe_constructor(node, classes)
            for method in methods_of(node):
                is_abstract = any("abstractmethod" in ast.unparse(name) for name in method.decorator_list)
                mark = "abstract " if is_abstract else ""
                signatures[f"{prefix}{node.name}.{method.name}"] = mark + describe(method.args)
    return signatures


def methods_of(node: ast.ClassDef) -> Iterator[ast.FunctionDef]:
    """Yield the methods and properties of a class that are not private. Pure."""
    for item in node.body:
        if isinstance(item, ast.FunctionDef) and not item.name.startswith("_"):
            yield item


def describe_constructor(node: ast.ClassDef, classes: Mapping[str, ast.ClassDef]) -> str:
    """Return what a class is built with: its ``__init__``, or the fields of a dataclass and of its bases. Pure."""
    for item in node.body:
        if isinstance(item, ast.FunctionDef) and item.name == "__init__":
            return describe(item.args)
    fields: dict[str, str] = {}
    for owner in [*reversed([classes[name] for name in base_names(node) if name in classes]), node]:
        for item in owner.body:
            if not isinstance(item, ast.AnnAssign) or not isinstance(item.target, ast.Name):
                continue
            if "ClassVar" not in ast.unparse(item.annotation):
                fields[item.target.id] = item.target.id + ("" if item.value is None else "=...")
    return ", ".join(["self", *fields.values()])


def base_names(node: ast.ClassDef) -> list[str]:
    """Return the names of a class's bases. Pure."""
    return [base.id for base in node.bases if isinstance(base, ast.Name)]


def describe(arguments: ast.arguments) -> str:
    """Return parameters as Python writes them, without types and with ``...`` for each default. Pure."""
    plain = ast.arguments(
        posonlyargs=[ast.arg(item.arg) for item in arguments.posonlyargs],
        args=[ast.arg(item.arg) for item in arguments.args],
        vararg=arguments.vararg and ast.arg(arguments.vararg.arg),
        kwonlyargs=[ast.arg(item.arg) for item in arguments.kwonlyargs],
        kw_defaults=[default and ast.Constant(...) for default in arguments.kw_defaults],
        kwarg=arguments.kwarg and ast.arg(arguments.kwarg.arg),
        defaults=[ast.Constant(...) for _ in arguments.defaults],
    )
    return ast.unparse(plain)


def merge(found: Mapping[str, Signatures]) -> dict[str, dict[str, str]]:
    """Return, for each name, its signatures and the releases that have them, as ``"0.28 0.29"``. Pure."""
    merged: dict[str, dict[str, list[str]]] = {}
    for release in sorted(found, key=lambda text: [int(part) for part in text.split(".")]):
        for name, signature in found[release].items():
            merged.setdefault(name, {}).setdefault(signature, []).append(release)
    return {
        name: {signature: " ".join(releases) for signature, releases in signatures.items()}
        for name, signatures in merged.items()
    }


if __name__ == "__main__":
    main()
