"""The limits find what they are meant to find, and nothing in clean code."""

from pathlib import Path

import pytest

from scripts import style_limits, style_words

CHECKED = next(place for place in style_words.WORDS_CHECKED_IN if not place.endswith(".py"))

CLEAN = '''"""A module."""


class Tier:
    """A class."""

    def lookup(self, key: bytes) -> bool:
        """Return whether the key is held."""
        return bool(key)
'''


def find(tmp_path: Path, text: str, name: str = "src/kvtier/tier.py") -> list[str]:
    """Return the messages for a file of that name and text."""
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    source = style_limits.read_source(path)
    package = {source.module: source} if source.module else {}
    of_classes = [*style_limits.check_class_size(package), *style_limits.check_overrides(package)]
    return [finding.message for finding in (*style_limits.check(source), *of_classes)]


def find_in_package(tmp_path: Path, texts: dict[str, str]) -> list[str]:
    """Return the messages for files of src/kvtier, by their names and texts, that they break together."""
    sources = []
    for name, text in texts.items():
        path = tmp_path / "src" / "kvtier" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        sources.append(style_limits.read_source(path))
    return [finding.message for finding in style_limits.check_package(sources)]


def function(body: str, head: str = "def work(items: list[int]) -> None:") -> str:
    """Return a module with one documented function of that body."""
    return f'"""A module."""\n\n\n{head}\n    """Do it."""\n{body}'


def test_clean_code_breaks_no_limit(tmp_path: Path) -> None:
    assert find(tmp_path, CLEAN) == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('"""A module."""\n' + "X = 1\n" * 500, "file of 501 lines"),
        (function("    X = 1\n" * 60), "work has 61 lines"),
        (function("    if items:\n        pass\n" * 12), "work has 13 branches"),
        (CLEAN.replace('    """A class."""\n', ""), "class Tier without a docstring"),
        (
            CLEAN.replace('        """Return whether the key is held."""\n', ""),
            "Tier.lookup without a docstring",
        ),
        (CLEAN.replace('"""A module."""\n', ""), "module without a docstring"),
        (CLEAN.replace("key: bytes", "key"), "Tier.lookup is not fully annotated"),
        (CLEAN.replace(" -> bool", ""), "Tier.lookup is not fully annotated"),
        (CLEAN + "# TO" + "DO: later\n", "debt in a comment"),
        (function("    try:\n        pass\n    except Exception:\n        pass\n"), "takes every exception"),
        (function("    try:\n        pass\n    except:\n        pass\n"), "takes every exception"),
        (
            function("    try:\n        pass\n    except (ValueError, BaseException):\n        pass\n"),
            "takes every",
        ),
    ],
)
def test_a_broken_limit_is_found_once(tmp_path: Path, text: str, expected: str) -> None:
    messages = find(tmp_path, text)

    assert len(messages) == 1
    assert messages[0].startswith(expected)


@pytest.mark.parametrize(
    "text",
    [
        '"""A module."""\n' + "X = 1\n" * 499,
        function("    X = 1\n" * 59),
        function("    if items:\n        pass\n" * 11),
        function("    try:\n        pass\n    except Exception:  # thread top\n        pass\n"),
        function("    try:\n        pass\n    except Exception:  # a foreign tier may raise\n        pass\n"),
        function("    try:\n        pass\n    except Exception:\n        raise\n"),
        CLEAN.replace("lookup", "_lookup").replace('        """Return whether the key is held."""\n', ""),
        CLEAN.replace("Tier", "_Tier").replace('    """A class."""\n', ""),
        "",
    ],
)
def test_the_edge_of_a_limit_is_allowed(tmp_path: Path, text: str) -> None:
    assert find(tmp_path, text) == []


def test_a_long_docstring_does_not_lengthen_its_function(tmp_path: Path) -> None:
    text = function("    X = 1\n" * 59).replace('"""Do it."""', '"""Do it.\n' + "    more\n" * 80 + '    """')

    assert find(tmp_path, text) == []


def methods(first: int, end: int) -> str:
    """Return documented methods of a class, numbered."""
    method = '    def m{}(self) -> None:\n        """Do."""\n'
    return "".join(map(method.format, range(first, end)))


def test_a_class_may_have_forty_methods_besides_overloads_and_shipped_tests(tmp_path: Path) -> None:
    overload = "    @typing.overload\n    def m0(self) -> None: ...\n"
    forty = '"""A module."""\n\n\nclass Big:\n    """A class."""\n' + methods(0, 40)

    assert find(tmp_path, forty + overload) == []
    assert find(tmp_path, forty + methods(0, 1).replace("m0", "test_it")) == []
    assert find(tmp_path, forty + methods(40, 41)) == ["Big has 41 methods, at most 40"]


BASE = '"""A module."""\n\n\nclass Base:\n    """A contract."""\n\n' + methods(0, 20) + "X = 1\n" * 60
CHILD = (
    '''"""A module."""

from kvtier.base import Base


class Child(Base):
    """An implementation."""

'''
    + "X = 1\n" * 60
)


def test_what_a_class_inherits_does_not_count(tmp_path: Path) -> None:
    child = CHILD.replace("X = 1\n", "") + methods(20, 60) + "X = 1\n" * 60

    assert find_in_package(tmp_path, {"base.py": BASE, "child.py": child}) == []


def test_an_override_has_no_docstring_and_every_other_public_method_has_one(tmp_path: Path) -> None:
    child = CHILD.replace("X = 1\n", "") + methods(0, 1) + "X = 1\n" * 60
    bare = CHILD.replace("X = 1\n", "") + "    def own(self) -> None:\n        return\n" + "X = 1\n" * 60

    assert find_in_package(tmp_path, {"base.py": BASE, "child.py": child}) == [
        "Child.m0 overrides: it inherits its docstring"
    ]
    assert find_in_package(tmp_path, {"base.py": BASE, "child.py": bare}) == ["Child.own without a docstring"]


def test_a_short_file_needs_three_importers_or_a_folder_of_implementations(tmp_path: Path) -> None:
    short = '"""A module."""\n\nX = 1\n'
    user = '"""A module."""\n\nfrom kvtier.short import X\n\n' + "Y = X\n" * 60
    users = {f"user{number}.py": user for number in range(3)}

    assert find_in_package(tmp_path, {"short.py": short, "user0.py": user}) == [
        "file of 3 lines with 1 importers: move it into one of them"
    ]
    assert find_in_package(tmp_path, {"short.py": short} | users) == []
    assert find_in_package(tmp_path, {"cpu/policies/own.py": short}) == []


@pytest.mark.parametrize(
    ("text", "phrase", "line"),
    [
        ('"""A module, for\n\nwhoever reads it."""\n', "whoever", 3),
        ('"""A module."""\n\nX = 1  # Nobody changes it.\n', "Nobody", 3),
        ('"""A module."""\n\nX = "the tier is told"\n', "is told", 3),
        ('"""A module."""\n\nX = 1\nY = f"{X} blocks are told in a while"\n', "are told", 4),
        ('"""A module."""\n\nX = 1\n"""The manager has\nheard of it."""\n', "has\\nheard", 4),
        ('"""A doomed module."""\n', "doomed", 1),
        ('"""The heir of a module."""\n', "heir", 1),
    ],
)
def test_personified_code_is_found_with_its_line(tmp_path: Path, text: str, phrase: str, line: int) -> None:
    path = tmp_path / CHECKED / "table.py"
    path.parent.mkdir(parents=True)
    path.write_text(text, encoding="utf-8")

    first, *_ = style_limits.check(style_limits.read_source(path))

    assert (first.line, first.message) == (line, f"'{phrase}' in prose: name who does what")


def test_words_are_checked_in_the_listed_places_and_not_in_names(tmp_path: Path) -> None:
    text = '"""A module that nobody reads."""\n'
    names = '"""A module."""\n\nnobody = whoever = 1\n'

    assert find(tmp_path, text, "examples/table.py") == []
    assert find(tmp_path, names, f"{CHECKED}/table.py") == []
    assert len(find(tmp_path, text, f"{CHECKED}/table.py")) == 1


@pytest.mark.parametrize("name", ["utils", "helpers", "misc"])
def test_a_module_named_after_nothing_is_refused(tmp_path: Path, name: str) -> None:
    (message,) = find(tmp_path, CLEAN, f"src/kvtier/{name}.py")

    assert "name the subject" in message


@pytest.mark.parametrize(
    "statement", ["def f() -> None:\n    '''Do.'''", "import a\na.b()", "X = f()", "if 1: pass"]
)
def test_a_package_init_has_no_logic(tmp_path: Path, statement: str) -> None:
    messages = find(tmp_path, f'"""A package."""\n\n{statement}\n', "src/kvtier/cpu/__init__.py")

    assert messages == ["logic in __init__.py: a docstring and re-exports only"]


def test_the_example_tier_may_be_its_package(tmp_path: Path) -> None:
    assert find(tmp_path, CLEAN, "src/kvtier/tiering/example/__init__.py") == []


def test_a_package_init_may_re_export(tmp_path: Path) -> None:
    text = '"""A package."""\n\nfrom kvtier.base import x\n\n__all__ = ["x"]\n__version__ = "1"\n'

    assert find(tmp_path, text, "src/kvtier/__init__.py") == []


def test_tests_need_no_docstrings_but_keep_the_lengths(tmp_path: Path) -> None:
    assert find(tmp_path, "def test_x():\n    pass\n", "tests/test_x.py") == []
    assert find(tmp_path, "X = 1\n" * 501, "tests/test_x.py") == ["file of 501 lines, at most 500"]


def test_the_command_fails_on_a_broken_limit_and_names_file_and_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.py").write_text(CLEAN + "def f():\n    '''Do.'''\n", encoding="utf-8")

    status = style_limits.main([str(tmp_path)])

    assert status == 1
    assert f"{tmp_path}/a.py:10: f is not fully annotated" in capsys.readouterr().out


def test_hidden_folders_are_not_measured(tmp_path: Path) -> None:
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / "a.py").write_text("def f(): pass\n", encoding="utf-8")

    assert list(style_limits.python_files([tmp_path])) == []


def test_the_medians_are_reported_beside_their_aims(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.py").write_text(CLEAN, encoding="utf-8")

    assert style_limits.main([str(tmp_path)]) == 0
    assert "median file 9 lines (aim 180)" in capsys.readouterr().out
