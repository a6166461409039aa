"""Proves the import rule: pure files cost nothing, and only compat.py knows SGLang's private names.

Also that nothing imports the top-level folders by their bare names, and that the core reaches the
extensions lazily only, so a stock server never loads them.
"""

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("sglang_tknp", "scheduler_ext", "model_ext", "launch")
PURE = (
    "topology",
    "placement",
    "layout",
    "traffic",
    "pool_plan",
    "shapes",
    "tables",
    "estimate",
    "checkpoint",
    "config",
    "refusals",
    "plugin",
)
# Pure too, but they live in an extension: the planner simulates pools with them.
PURE_CONTROLLER = (
    "messages",
    "ledger",
    "prefixes",
    "policy",
    "waiting",
    "admission",
    "assigner",
    "view",
)
PRIVATE = ("sglang_tknp/compat.py", "sglang_tknp/compat_ipc.py")
BARE = {"scheduler_ext", "model_ext", "launch"}
EXTENSIONS = tuple(f"sglang_tknp.{folder}" for folder in sorted(BARE))
OURS = sorted(file for folder in FOLDERS for file in (ROOT / folder).glob("**/*.py"))
ALL = sorted({*OURS, *(ROOT / "tests").glob("**/*.py"), *(ROOT / "bench").glob("**/*.py")})


def name_of(file: Path) -> str:
    return str(file.relative_to(ROOT))


def imported(node: ast.AST) -> Iterator[str]:
    """Dotted names that one import statement names: `from a import b` gives a.b."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        yield from (f"{'.' * node.level}{node.module or ''}.{a.name}" for a in node.names)


def all_imports(source: str) -> list[str]:
    return [name for node in ast.walk(ast.parse(source)) for name in imported(node)]


def module_level_imports(source: str) -> list[str]:
    """Imports that run when the module is imported: those outside functions and TYPE_CHECKING."""
    found: list[str] = []
    pending: list[ast.AST] = [ast.parse(source)]
    while pending:
        node = pending.pop()
        found.extend(imported(node))
        lazy = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        typing_only = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        if not lazy and not typing_only:
            pending.extend(ast.iter_child_nodes(node))
    return found


def private_names(source: str) -> list[str]:
    """What only compat.py may name: underscore names of sglang's, and its hook registry."""
    found = [
        name
        for name in all_imports(source)
        if name.split(".")[0] == "sglang" and any(p.startswith("_") for p in name.split("."))
    ]
    for node in ast.walk(ast.parse(source)):
        names = (getattr(node, field, None) for field in ("id", "attr", "name"))
        found.extend(name for name in names if name == "HookRegistry")
    return found


def bare_names(source: str) -> list[str]:
    return [name for name in all_imports(source) if name.split(".")[0] in BARE]


@pytest.fixture(scope="module")
def loaded() -> dict[str, list[str]]:
    """For each pure file, the heavy modules that a fresh interpreter has after importing it."""
    script = (
        "import json, sys\n"
        "found = {}\n"
        f"for name in {PURE!r}:\n"
        "    __import__('sglang_tknp.' + name)\n"
        "    found[name] = sorted({m.split('.')[0] for m in sys.modules} & {'torch', 'sglang'})\n"
        f"    found[name] += [m for m in sys.modules if m.startswith({EXTENSIONS!r})]\n"
        f"for name in {PURE_CONTROLLER!r}:\n"
        "    __import__('sglang_tknp.scheduler_ext.' + name)\n"
        "    found[name] = sorted({m.split('.')[0] for m in sys.modules} & {'torch', 'sglang'})\n"
        "print(json.dumps(found))\n"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT)
    assert run.returncode == 0, run.stderr
    return dict(json.loads(run.stdout))


@pytest.mark.parametrize("name", PURE + PURE_CONTROLLER)
def test_pure_files_load_neither_torch_nor_sglang(loaded: dict[str, list[str]], name: str) -> None:
    assert loaded[name] == []


def test_the_folders_are_found() -> None:
    assert {file.relative_to(ROOT).parts[0] for file in OURS} == set(FOLDERS)
    assert len(OURS) >= 20


@pytest.mark.parametrize("file", ALL, ids=name_of)
def test_no_bare_names(file: Path) -> None:
    assert bare_names(file.read_text()) == []


@pytest.mark.parametrize("file", OURS, ids=name_of)
def test_only_compat_names_sglangs_private_things(file: Path) -> None:
    found = private_names(file.read_text())
    if name_of(file) == "sglang_tknp/compat.py":
        assert "HookRegistry" in found
    elif name_of(file) not in PRIVATE:
        assert found == []


@pytest.mark.parametrize("file", [f for f in OURS if f.parent.name == "sglang_tknp"], ids=name_of)
def test_the_core_reaches_extensions_lazily_only(file: Path) -> None:
    found = module_level_imports(file.read_text())
    assert [name for name in found if name.startswith(EXTENSIONS)] == []


@pytest.mark.parametrize("name", ["topology", "placement", "layout"])
def test_pure_files_import_nothing_heavy_even_lazily(name: str) -> None:
    roots = {i.split(".")[0] for i in all_imports((ROOT / f"sglang_tknp/{name}.py").read_text())}
    assert not roots & {"torch", "sglang", "numpy", "transformers"}


@pytest.mark.parametrize("name", ["exchange", "transport", "transport_stream"])
def test_what_sends_imports_no_sglang_even_lazily(name: str) -> None:
    found = all_imports((ROOT / f"sglang_tknp/{name}.py").read_text())
    roots = {i.split(".")[0] for i in found}
    assert "torch" in roots and "sglang" not in roots


def test_the_checks_see_violations() -> None:
    assert bare_names("def f():\n    from model_ext.step import Step\n    import launch") == [
        "model_ext.step.Step",
        "launch",
    ]
    assert private_names("from sglang.srt.a import _b") == ["sglang.srt.a._b"]
    assert private_names("import sglang.srt._a.b") == ["sglang.srt._a.b"]
    assert private_names("registry.HookRegistry.apply_hooks()") == ["HookRegistry"]
    assert "HookRegistry" in private_names("from sglang.x import HookRegistry as h")
    assert private_names("from sglang.srt.a import b\nfrom os import _exit") == []
    assert module_level_imports("class A:\n    import a\nif x:\n    from b import c") == [
        "b.c",
        "a",
    ]
    assert module_level_imports("def f():\n    import a\nif TYPE_CHECKING:\n    import b") == []
