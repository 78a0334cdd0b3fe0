"""The checks of the tidy test: each takes the root of a tree and gives what is wrong there.

A finding is (rule, place, text); `place` is a path, with the function's name behind a colon where
one is meant, and is what the list of exceptions names.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import cpp_scan

MAX_COLUMNS = 100
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_KERNEL_LINES = 100
MIN_OPENING_LINES = 2
MIN_HEADER_LINES = 5
MAX_PARAMETERS = 5
MAX_KERNEL_PARAMETERS = 6  # plain loops over arrays: a struct would hide what they read

LEVELS = {
    "base": 0, "kernels": 1, "partition": 2, "codec": 2, "scheme": 3, "delta": 3, "plan": 4,
    "driver": 4, "engine": 5, "ckpt": 5,
}  # fmt: skip

CPP_FOLDERS = ("core", "python/src", "bench", "examples", "fuzz", "tests", "tools")
PYTHON_FOLDERS = ("python", "bench", "examples", "tests", "tools", "scripts")
CPP_SUFFIXES = {".cpp", ".hpp", ".cu", ".cuh"}


class Finding(NamedTuple):
    rule: str
    place: str
    text: str


def _files(root: Path, folders: tuple[str, ...], suffixes: set[str]) -> Iterator[Path]:
    seen: set[Path] = set()
    for folder in folders:
        for path in sorted((root / folder).rglob("*")):
            hidden = any(part.startswith((".", "build")) for part in path.relative_to(root).parts)
            if path.suffix in suffixes and path.is_file() and not hidden and path not in seen:
                seen.add(path)
                yield path


def cpp_files(root: Path) -> Iterator[tuple[str, str]]:
    for path in _files(root, CPP_FOLDERS, CPP_SUFFIXES):
        yield path.relative_to(root).as_posix(), path.read_text(encoding="utf-8")


def python_files(root: Path) -> Iterator[tuple[str, str]]:
    for path in _files(root, PYTHON_FOLDERS, {".py"}):
        yield path.relative_to(root).as_posix(), path.read_text(encoding="utf-8")


def sizes(root: Path) -> Iterator[Finding]:
    """Lines of files, columns of lines."""
    for place, text in [*cpp_files(root), *python_files(root)]:
        lines = text.splitlines()
        if len(lines) > MAX_FILE_LINES:
            yield Finding("file-lines", place, f"{len(lines)} lines (≤ {MAX_FILE_LINES})")
        for number, line in enumerate(lines, 1):
            if len(line) > MAX_COLUMNS:
                where = f"line {number}: {len(line)} columns (≤ {MAX_COLUMNS})"
                yield Finding("columns", place, where)


def cpp_functions(root: Path) -> Iterator[Finding]:
    """Lines and parameters of C++ functions."""
    for place, text in cpp_files(root):
        limit = MAX_KERNEL_LINES if place.startswith("core/kernels/src") else MAX_FUNCTION_LINES
        for function in cpp_scan.functions(text):
            where = f"{place}:{function.name}"
            if function.lines > limit:
                yield Finding("function-lines", where, f"{function.lines} lines (≤ {limit})")
            most = MAX_KERNEL_PARAMETERS if place.startswith("core/kernels/") else MAX_PARAMETERS
            if function.parameters > most:
                text_ = f"{function.parameters} parameters (≤ {most})"
                yield Finding("parameters", where, text_)


def python_functions(root: Path) -> Iterator[Finding]:
    """Lines and parameters of Python functions; keyword-only parameters are the options struct."""
    for place, text in python_files(root):
        for node in ast.walk(ast.parse(text)):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            where = f"{place}:{node.name}"
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > MAX_FUNCTION_LINES:
                limit = f"{lines} lines (≤ {MAX_FUNCTION_LINES})"
                yield Finding("function-lines", where, limit)
            names = [a.arg for a in node.args.posonlyargs + node.args.args]
            count = len(names) - (names[:1] in (["self"], ["cls"]))
            if count > MAX_PARAMETERS and not place.startswith("tests/"):
                yield Finding("parameters", where, f"{count} parameters (≤ {MAX_PARAMETERS})")


def opening_comments(root: Path) -> Iterator[Finding]:
    """Each C++ file opens with a comment of two lines or more, a public header of the core of five
    (place, owner, threads, failures); each Python file of ours with a docstring."""
    for place, text in cpp_files(root):
        least = MIN_HEADER_LINES if re.match(r"core/\w+/include/", place) else MIN_OPENING_LINES
        match = re.match(r"(?://[^\n]*\n)*", text)
        found = match.group(0).count("\n") if match else 0
        if found < least:
            yield Finding("opening", place, f"opens with {found} lines of comment (≥ {least})")
    for place, text in python_files(root):
        if text.strip() and ast.get_docstring(ast.parse(text)) is None:
            yield Finding("opening", place, "does not open with a docstring")


def declared_deps(root: Path) -> dict[str, set[str]]:
    """Module → the modules that its CMakeLists.txt names behind DEPS (all zensync_module calls)."""
    result: dict[str, set[str]] = {}
    for path in sorted((root / "core").glob("*/CMakeLists.txt")):
        text = re.sub(r"#[^\n]*", "", path.read_text(encoding="utf-8"))
        for match in re.finditer(r"zensync_module\(\s*(\w+)([^)]*)\)", text):
            deps = re.search(r"\bDEPS\b((?:\s+(?!SOURCES|LIBS)[\w$]+)*)", match.group(2))
            result.setdefault(match.group(1), set()).update(deps.group(1).split() if deps else [])
    return result


def module_order(root: Path) -> Iterator[Finding]:
    """DEPS point to lower or equal levels and never round; includes only to modules in DEPS."""
    deps = declared_deps(root)
    for module, names in deps.items():
        place = f"core/{module}/CMakeLists.txt"
        if module not in LEVELS:
            yield Finding("order", place, f"module '{module}' has no level")
            continue
        for name in sorted(names):
            if LEVELS.get(name, 99) > LEVELS[module]:
                yield Finding("order", place, f"depends upwards on '{name}'")
            elif module in deps.get(name, set()) or name == module:
                yield Finding("order", place, f"'{module}' and '{name}' depend on each other")
    for place, text in cpp_files(root):
        match = re.match(r"core/(\w+)/(?:include|src)/", place)
        if not match:
            continue
        module = match.group(1)
        allowed = deps.get(module, set()) | {module}
        for name in re.findall(r'^\s*#\s*include\s*[<"]zensync/(\w+)/', text, re.MULTILINE):
            if name not in allowed:
                yield Finding("order", place, f"includes '{name}', which is not in its DEPS")


_FORBIDDEN = {
    "prints": r"\bstd::(?:cout|cerr|clog)\b"
    r"|(?<!\w)(?:v?f?printf|f?puts|f?putc|putchar|perror)\s*\(",
    "exits": r"\bstd::(?:abort|exit|_Exit|quick_exit|terminate)\b"
    r"|(?<![\w.>:])(?:exit|_exit|_Exit|quick_exit)\s*\("
    r"|(?<!\w)::(?:abort|exit|_exit|_Exit|quick_exit)\s*\("
    r"|(?<![\w.>:])abort\s*\(\s*\)",
}
_ENVIRONMENT = r"\b(?:secure_)?getenv\s*\("


def core_manners(root: Path) -> Iterator[Finding]:
    """The core never prints or exits; it reads the environment in base/src/env.cpp only."""
    for place, text in cpp_files(root):
        if not re.match(r"core/\w+/(include|src)/|python/src/", place):
            continue
        code = cpp_scan.strip(text)
        for what, pattern in _FORBIDDEN.items():
            for match in re.finditer(pattern, code):
                line = code.count("\n", 0, match.start()) + 1
                yield Finding("manners", place, f"line {line} {what}: {match.group(0).strip()}")
        if place != "core/base/src/env.cpp" and re.search(_ENVIRONMENT, code):
            yield Finding("environment", place, "reads the environment; base/src/env.cpp does that")


# Private names that tensors and modules of torch carry: no import gives them away.
_PRIVATE_OF_TORCH = re.compile(
    r"^(_get_(default_(group|store)|pg|backend|process_group)\w*|_nnz|_indices|_values|_coalesced_?"
    r"|_sparse_coo_tensor_unsafe|_set_params_and_buffers_to_ignore_for_model|_ddp_\w+|_dispatch\w*"
    r"|_post_backward\w*|_world|_rank_not_in_group|_C|_dynamo|_inductor|_foreach\w*)$"
)
COMPAT = "python/zensync/_torch_compat.py"


def torch_privacy(root: Path) -> Iterator[Finding]:
    """Private names of torch are used in one file only."""
    for place, text in python_files(root):
        if place == COMPAT or not place.startswith("python/zensync/"):
            continue
        tree = ast.parse(text)
        ours = _torch_names(tree)
        for node in ast.walk(tree):
            for name in _private_names(node, ours):
                line = getattr(node, "lineno", 0)
                yield Finding("torch-privacy", place, f"line {line}: private torch name {name}")


def _torch_names(tree: ast.Module) -> set[str]:
    """Names that this file binds to torch or to something imported from it."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "torch":
                    names.add((alias.asname or "torch").split(".")[0])
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            names.update(alias.asname or alias.name for alias in node.names)
    return names


def _private_names(node: ast.AST, torch_names: set[str]) -> Iterator[str]:
    if isinstance(node, ast.Attribute):
        root: ast.expr = node
        while isinstance(root, ast.Attribute):
            root = root.value
        from_torch = isinstance(root, ast.Name) and root.id in torch_names
        if (from_torch and _is_private(node.attr)) or _PRIVATE_OF_TORCH.match(node.attr):
            yield node.attr
    elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
        parts = (node.module or "").split(".") + [alias.name for alias in node.names]
        yield from (part for part in parts if _is_private(part))
    elif isinstance(node, ast.Import):
        for alias in node.names:
            parts = alias.name.split(".")
            yield from (part for part in parts if parts[0] == "torch" and _is_private(part))
    elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "hasattr"):
        for argument in node.args[1:2]:
            text = argument.value if isinstance(argument, ast.Constant) else None
            if isinstance(text, str) and _PRIVATE_OF_TORCH.match(text):
                yield text


# Who may touch the environment, and what for; settings of the core are read in base/src/env.cpp.
ENVIRONMENT_OF_PYTHON = {
    "python/zensync/_debug.py": "ZENSYNC_DEBUG, read at import; shows what is set",
    "python/zensync/_mesh.py": "MASTER_ADDR, where the store has no address",
    "python/zensync/_settings.py": "ZENSYNC_VERIFY, of which `info` says whether it can be had",
    "python/zensync/bench/torchrun.py": "RANK and WORLD_SIZE, where torchrun started it",
    "python/zensync/cli.py": "`info` shows what is set",
    "python/zensync/demo/data.py": "ZENSYNC_DATA",
    "python/zensync/lab/processes.py": "hands its own to the ranks",
}
_ENVIRONMENT_NAMES = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}


def environment(root: Path) -> Iterator[Finding]:
    """The package touches the environment in few files only."""
    for place, text in python_files(root):
        if place in ENVIRONMENT_OF_PYTHON or not place.startswith("python/zensync/"):
            continue
        for node in ast.walk(ast.parse(text)):
            names: list[str] = []
            if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") in ("os", "posix"):
                names = [node.attr]
            elif isinstance(node, ast.ImportFrom) and node.module in ("os", "posix"):
                names = [alias.name for alias in node.names]
            for name in _ENVIRONMENT_NAMES.intersection(names):
                line = getattr(node, "lineno", 0)
                yield Finding("environment", place, f"line {line}: {name}; see the list in checks")


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def versions(root: Path) -> Iterator[Finding]:
    """One version: CMake's and the Python package's are the same."""
    cmake = re.search(
        r"VERSION\s+([\d.]+)", (root / "CMakeLists.txt").read_text().split("project(")[1]
    )
    python = re.search(
        r'^version = "([\d.]+)"', (root / "pyproject.toml").read_text(), re.MULTILINE
    )
    if not cmake or not python or cmake.group(1) != python.group(1):
        yield Finding("versions", "pyproject.toml", "its version differs from CMakeLists.txt's")


ALL = (
    sizes, cpp_functions, python_functions, opening_comments, module_order, core_manners,
    torch_privacy, environment, versions,
)  # fmt: skip
