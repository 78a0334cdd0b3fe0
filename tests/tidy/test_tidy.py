"""Style budgets and the order of modules, checked over the whole tree; see docs/architecture.md.

Every check has a negative control: a small made tree that is clean but for one fault, which the
check must find.
"""

from __future__ import annotations

from pathlib import Path

import checks
import cpp_scan
import pytest

ROOT = Path(__file__).resolve().parents[2]
EXCEPTIONS = Path(__file__).with_name("exceptions.txt")


def read_exceptions(text: str) -> tuple[int, list[tuple[str, str]]]:
    limit, entries = 0, []
    for line in text.splitlines():
        words = line.split("#")[0].split()
        if words[:1] == ["limit"]:
            limit = int(words[1])
        elif words:
            entries.append((words[0], words[1]))
    return limit, entries


@pytest.mark.parametrize("check", checks.ALL, ids=lambda check: check.__name__)
def test_tree(check):
    _, allowed = read_exceptions(EXCEPTIONS.read_text())
    findings = [f for f in check(ROOT) if (f.rule, f.place) not in allowed]
    assert not findings, "\n" + "\n".join(f"{f.rule} {f.place}  {f.text}" for f in findings)


def test_exceptions_shrink():
    limit, allowed = read_exceptions(EXCEPTIONS.read_text())
    tripped = {(f.rule, f.place) for check in checks.ALL for f in check(ROOT)}
    assert [entry for entry in allowed if entry not in tripped] == [], "remove what is not needed"
    assert len(allowed) == limit, "the limit is the number of entries, and goes down with it"


# ---- negative controls

HEAD = "// One.\n// Two.\n"
DOC = '"""Text."""\n'

CLEAN = {
    "CMakeLists.txt": "project(zensync VERSION 0.1.0 LANGUAGES CXX)\n",
    "pyproject.toml": '[project]\nversion = "0.1.0"\n',
    "core/base/CMakeLists.txt": "zensync_module(base SOURCES src/env.cpp)\n",
    "core/codec/CMakeLists.txt": "zensync_module(codec SOURCES src/a.cpp DEPS base)\n",
    "core/base/src/env.cpp": HEAD + '#include <cstdlib>\nauto v() { return getenv("A"); }\n',
    "core/codec/src/a.cpp": HEAD + '#include "zensync/base/env.hpp"\nint f(int a);\n',
    "python/zensync/__init__.py": DOC + "\nimport torch\n\n\ndef f(a):\n    return torch.ones(a)\n",
    "python/zensync/_torch_compat.py": DOC + "\nfrom torch._C import _x\n",
}

CPP = "core/codec/src/a.cpp"
PY = "python/zensync/__init__.py"
BODY = "".join(f"  a += {i};\n" for i in range(60))

FAULTS = {
    "columns-cpp": ("columns", CPP, HEAD + "// " + "x" * 98 + "\n"),
    "columns-py": ("columns", PY, DOC + "# " + "x" * 99 + "\n"),
    "file-lines-cpp": ("file-lines", CPP, HEAD + "// x\n" * 399),
    "file-lines-py": ("file-lines", PY, DOC + "# x\n" * 400),
    "function-lines-cpp": ("function-lines", CPP, HEAD + "int f(int a) {\n" + BODY + "}\n"),
    "function-lines-member": (
        "function-lines",
        CPP,
        HEAD + "class A {\n public:\n  A(int a) : a_{a}, b_(1) {\n" + BODY + "  }\n};\n",
    ),
    "function-lines-py": (
        "function-lines",
        PY,
        DOC + '\n\ndef f(a):\n' + "    a += 1\n" * 60,
    ),
    "parameters-cpp": ("parameters", CPP, HEAD + "int f(int a, A b, B c, C d, D e, G g) {}"),
    "parameters-template": (
        "parameters",
        CPP,
        HEAD + "template <class T>\nvoid B<T>::f(M<int, int> a, T b, T c, T d, T e,\n  T g) {}",
    ),
    "parameters-py": ("parameters", PY, DOC + '\n\ndef f(a, b, c, d, e, g):\n    pass\n'),
    "opening-cpp": ("opening", CPP, "// One line only.\nint a;\n"),
    "opening-header": (
        "opening",
        "core/codec/include/zensync/codec/a.hpp",
        HEAD * 2 + "int a;\n",
    ),
    "opening-py": ("opening", PY, "import os\n"),
    "order-include": ("order", CPP, HEAD + '#include "zensync/engine/engine.hpp"\n'),
    "order-include-undeclared": ("order", CPP, HEAD + '#include "zensync/kernels/kernels.hpp"\n'),
    "order-deps": (
        "order",
        "core/codec/CMakeLists.txt",
        "zensync_module(codec SOURCES a.cpp DEPS base engine)\n",
    ),
    "order-unknown": (
        "order",
        "core/codec/CMakeLists.txt",
        "zensync_module(codec SOURCES a.cpp DEPS base misc)\n",
    ),
    "order-round": (
        "order",
        "core/base/CMakeLists.txt",
        "zensync_module(base DEPS base)\n",
    ),
    "prints-cout": ("manners", CPP, HEAD + "void f() { std::cout << 1; }\n"),
    "prints-printf": ("manners", CPP, HEAD + 'void f() { std::printf("x"); }\n'),
    "exits": ("manners", CPP, HEAD + "void f() { exit(1); }\n"),
    "aborts": ("manners", CPP, HEAD + "void f() { std::abort(); }\n"),
    "aborts-bare": ("manners", CPP, HEAD + "void f() { abort(); }\n"),
    "getenv": ("environment", CPP, HEAD + 'auto f() { return std::getenv("A"); }\n'),
    "os-environ": ("environment", PY, DOC + 'import os\nx = os.environ["A"]\n'),
    "os-getenv": ("environment", PY, DOC + 'import os\nx = os.getenv("A")\n'),
    "os-import": ("environment", PY, DOC + "from os import environ as e\n"),
    "torch-c": ("torch-privacy", PY, DOC + 'import torch\nx = torch._C.f\n'),
    "torch-import": (
        "torch-privacy",
        PY,
        DOC + 'from torch.distributed.distributed_c10d import _get_default_group\n',
    ),
    "torch-alias": (
        "torch-privacy",
        PY,
        DOC + 'import torch.distributed as dist\nx = dist.distributed_c10d._world\n',
    ),
    "torch-class": (
        "torch-privacy",
        PY,
        DOC + "from torch.nn.parallel import DistributedDataParallel as D\nD._anything()\n",
    ),
    "torch-tensor": ("torch-privacy", PY, DOC + '\n\ndef f(t):\n    return t._indices()\n'),
    "torch-getattr": ("torch-privacy", PY, DOC + 'x = getattr(t, "_nnz")\n'),
    "versions": ("versions", "pyproject.toml", '[project]\nversion = "0.2.0"\n'),
}  # fmt: skip


def make_tree(root: Path, files: dict[str, str]) -> None:
    for place, text in files.items():
        path = root / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def all_findings(root: Path) -> list[checks.Finding]:
    return [finding for check in checks.ALL for finding in check(root)]


def test_clean_tree_has_no_findings(tmp_path):
    make_tree(tmp_path, CLEAN)
    assert all_findings(tmp_path) == []


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_found(tmp_path, name):
    rule, place, text = FAULTS[name]
    make_tree(tmp_path, {**CLEAN, place: text})
    found = all_findings(tmp_path)
    assert {f.rule for f in found} == {rule}, found
    assert all(f.place.split(":")[0] == place for f in found)


@pytest.mark.parametrize(
    "code",
    [
        "void f() { driver->abort(why); peer.abort(); }\n",
        "void Mesh::abort(const Error& why) { close(why); }\n",
        "Status abort(const Error& why);\n",
        '// std::abort() and printf( are words here\nauto s = "std::cout";\n',
        "int n = std::snprintf(buffer, 4, text);\n",
    ],
)
def test_harmless_code_passes(tmp_path, code):
    make_tree(tmp_path, {**CLEAN, CPP: HEAD + code})
    assert all_findings(tmp_path) == []


@pytest.mark.parametrize("place", checks.ENVIRONMENT_OF_PYTHON)
def test_listed_files_may_touch_the_environment(tmp_path, place):
    assert "environ" in (ROOT / place).read_text(), "take it off the list"
    make_tree(tmp_path, {**CLEAN, place: DOC + 'import os\nx = os.environ["A"]\n'})
    assert all_findings(tmp_path) == []


def test_functions_of_cpp_are_found():
    text = """
#define M(x) \\
  { x }
namespace a { namespace {
struct S { int x{3}; int get() const { return x; } };
enum class E : int { kA = 1 };
constexpr int kT[] = {1, 2};
template <class T, int N = 3>
T add(T a,
      std::array<T, N> b) {
  auto g = [&](int c) { if (c) { return 1; } return 2; };
  return a + g(1);
}
Thing::Thing(int a, int b) : a_{a}, b_(b) { run(); }
bool S::operator()(int a, int b) const noexcept { return '{' == a; }
}}
"""
    found = {f.name: (f.lines, f.parameters) for f in cpp_scan.functions(text)}
    assert found == {
        "get": (1, 0),
        "add": (6, 2),
        "Thing::Thing": (1, 2),
        "S::operator_call": (1, 2),
    }
