"""A wheel is repaired for other machines, and one without its compiled modules or without URLs is refused."""

import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from scripts.build_wheel import main, missing_modules

WHEEL = "kvtier-1.0-cp311-abi3-linux_x86_64.whl"
METADATA = "kvtier-1.0.dist-info/METADATA"
URLS = ("Homepage, https://forge.example.org/kvtier",)
WHOLE = ("kvtier/a.py", "kvtier/b.pyi", "kvtier/b.abi3.so", "kvtier/c/d.pyi", "kvtier/c/d.abi3.so")


def write_wheel(path: Path, names: Sequence[str], urls: Sequence[str] = URLS) -> Path:
    """Write an archive with empty files, and metadata with ``urls``."""
    with zipfile.ZipFile(path, "w") as archive:
        for name in names:
            archive.writestr(name, "")
        archive.writestr(METADATA, "".join(["Name: kvtier\n", *(f"Project-URL: {url}\n" for url in urls)]))
    return path


def builder(
    names: Sequence[str], statuses: dict[str, int] | None = None, urls: Sequence[str] = URLS
) -> Callable[[Sequence[str]], int]:
    """Return what stands in for the tools: it builds a wheel with ``names``, and names a repaired one anew."""

    def run(command: Sequence[str]) -> int:
        tool = command[command.index("-m") + 1]
        if tool == "build":
            folder = Path(command[command.index("--outdir") + 1])
            write_wheel(folder / WHEEL, names, urls)
            (folder / "kvtier-1.0.tar.gz").write_bytes(b"source")
        else:
            folder = Path(command[command.index("-w") + 1])
            write_wheel(folder / WHEEL.replace("linux", "manylinux_2_28"), names)
        return (statuses or {}).get(tool, 0)

    return run


def test_each_stub_stands_for_a_compiled_module(tmp_path: Path) -> None:
    assert missing_modules(write_wheel(tmp_path / "whole.whl", WHOLE)) == []
    assert missing_modules(write_wheel(tmp_path / "part.whl", WHOLE[:-1])) == ["kvtier/c/d.abi3.so"]


def test_the_repaired_wheel_and_the_source_are_what_stays(tmp_path: Path) -> None:
    main([str(tmp_path / "dist")], builder(WHOLE))

    names = sorted(path.name for path in (tmp_path / "dist").iterdir())
    assert names == ["kvtier-1.0-cp311-abi3-manylinux_2_28_x86_64.whl", "kvtier-1.0.tar.gz"]


def test_a_wheel_without_a_compiled_module_is_refused_and_left_nowhere(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"lacks kvtier/c/d\.abi3\.so: a C compiler and Python's headers"):
        main([str(tmp_path)], builder(WHOLE[:-1]))
    assert list(tmp_path.iterdir()) == []


def test_a_wheel_that_does_not_say_where_the_project_lives_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"does not say where the project lives.*KVTIER_PROJECT_URL=https"):
        main([str(tmp_path)], builder(WHOLE, urls=()))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("tool", ["build", "auditwheel"])
def test_a_tool_that_fails_ends_the_program_with_its_status(tmp_path: Path, tool: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main([str(tmp_path)], builder(WHOLE, {tool: 3}))
    assert ended.value.code == 3
