"""Finds function definitions in C++ text, well enough for budgets: names, lines, parameters.

No compiler is asked: comments and literals are blanked, then braces are matched and each block is
named by the text in front of it. Lambdas belong to the function that holds them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_TOKENS = re.compile(
    r'R"(?P<delim>[^()\\ ]{0,16})\(.*?\)(?P=delim)"'
    r"|//[^\n]*|/\*.*?\*/"
    r'|"(?:\\.|[^"\\\n])*"'
    r"|(?<![0-9a-fA-F])'(?:\\.|[^'\\\n])+'",
    re.DOTALL,
)
_NO_PARAMETERS = {
    "alignas", "decltype", "noexcept", "requires", "explicit", "if", "for", "while", "switch",
    "catch", "return", "sizeof", "defined", "__attribute__", "static_assert",
}  # fmt: skip
_TYPE = re.compile(r"\b(class|struct|union|enum)\b(?![^{]*\)\s*(const|noexcept|override|\w)*\s*$)")
_INIT_LIST = re.compile(r"\)\s*(noexcept\s*)?:(?!:)[^;]*[\w>]\s*$")


@dataclass(frozen=True)
class Function:
    name: str
    first_line: int
    lines: int
    parameters: int


def strip(text: str) -> str:
    """The text with comments and literals blanked, same length, same lines."""

    def blank(match: re.Match[str]) -> str:
        found = match.group(0)
        inside = re.sub(r"[^\n]", " ", found)
        return inside if found.startswith("/") else '"' + inside[1:-1] + '"'

    return _TOKENS.sub(blank, text)


def without_preprocessor(text: str) -> str:
    """Blanks preprocessor lines, continued ones too."""
    return re.sub(
        r"^[ \t]*#(?:[^\n\\]|\\\n|\\.)*", lambda m: re.sub(r"[^\n]", " ", m.group(0)), text,
        flags=re.MULTILINE,
    )  # fmt: skip


def functions(text: str) -> list[Function]:
    """All function definitions, in the order of their end."""
    code = without_preprocessor(strip(text))
    found: list[Function] = []
    blocks: list[tuple[str, str, int]] = []  # (kind, header, offset of the header)
    start = 0
    for match in re.finditer(r"[{};]", code):
        position, sign = match.start(), match.group(0)
        if sign == "{":
            header = code[start:position]
            inside = any(kind in ("function", "braces") for kind, _, _ in blocks)
            kind = "braces" if inside or _INIT_LIST.search(header) else _kind(header)
            blocks.append((kind, header, start))
            if kind == "braces":
                continue  # an initialiser inside a header: the header goes on behind it
        elif sign == "}" and blocks:
            kind, header, header_start = blocks.pop()
            if kind == "braces":
                continue
            if kind == "function":
                found.append(_function(code, header, header_start, position))
        elif any(kind in ("function", "braces") for kind, _, _ in blocks):
            continue
        start = position + 1
    return found


def _kind(header: str) -> str:
    plain = _without_templates(header)
    if re.search(r"\bnamespace\b|\bextern\s*\"", header):
        return "namespace"
    if _TYPE.search(plain) and "=" not in plain:
        return "type"
    if re.search(r"=\s*$", plain) or not _parameter_list(plain)[0]:
        return "other"
    return "function"


def _function(code: str, header: str, header_start: int, end: int) -> Function:
    first = header_start + len(header) - len(header.lstrip())
    name, inside = _parameter_list(_without_templates(header))
    lines = code.count("\n", first, end) + 1
    return Function(name, code.count("\n", 0, first) + 1, lines, _count(inside))


def _without_templates(header: str) -> str:
    """Drops `template <…>` in front, and access labels."""
    text = re.sub(r"\b(public|private|protected)\s*:(?!:)", " ", header).lstrip()
    while match := re.match(r"(template|requires)\s*<", text):
        text = text[_closing(text, match.end() - 1, "<", ">") :].lstrip()
    return text


def _parameter_list(header: str) -> tuple[str, str]:
    """Name of the function that the header declares and the text between its parentheses."""
    header = re.sub(r"operator\s*\(\s*\)", "operator_call", header)
    for match in re.finditer(r"([\w:~]+|operator[^\w\s(]+)\s*\(", header):
        name = match.group(1)
        if name.isupper() or name in _NO_PARAMETERS:
            continue  # a macro or a keyword
        opening = match.end() - 1
        return name, header[opening + 1 : _closing(header, opening, "(", ")") - 1]
    return "", ""


def _closing(text: str, opening: int, left: str, right: str) -> int:
    depth = 0
    for position in range(opening, len(text)):
        depth += (text[position] == left) - (text[position] == right)
        if depth == 0:
            return position + 1
    return len(text)


def _count(inside: str) -> int:
    if inside.strip() in ("", "void"):
        return 0
    depth, commas = 0, 0
    for sign in inside.replace("->", "  "):
        depth += (sign in "(<[{") - (sign in ")>]}")
        commas += sign == "," and depth == 0
    return commas + 1
