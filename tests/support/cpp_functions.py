"""The functions and loops of a C++ file and how long they are, for tests of the sources."""

from __future__ import annotations

import re

_TOKEN = re.compile(
    r"//[^\n]*|/\*.*?\*/|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])*'|[{};]",
    re.DOTALL,
)
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_SCOPE = re.compile(r"\s*(?:template\s*<[^{]*>\s*)?(?:namespace|struct|class|union|extern)\b")
_FUNCTION = re.compile(r"\)[^()]*$")
_LOOP = re.compile(r"\b(?:for|while) \(")
_NOT_NAMES = {"__launch_bounds__", "__attribute__", "decltype", "alignas"}
_DIRECTIVE = re.compile(r"^[ \t]*#(?:[^\n\\]|\\\n|\\.)*", re.MULTILINE)


def functions(source: str) -> list[tuple[str, int]]:
    """(name, lines) of every function defined in a namespace or a class; what is inside of functions counts as theirs."""
    source = _DIRECTIVE.sub(lambda m: "\n" * m[0].count("\n"), source)
    found: list[tuple[str, int]] = []
    scopes: list[tuple[str, int]] = []  # name of a function, or "" for a namespace or class; line
    nested = 0  # braces inside a function
    begin = 0  # of the text before the next brace
    for token in _TOKEN.finditer(source):
        if token[0] == "{":
            head = _COMMENT.sub("", source[begin : token.start()])
            if nested:
                nested += 1
            elif _FUNCTION.search(head) and not _SCOPE.match(head):
                names = [n for n in re.findall(r"(\w+)\s*\(", head) if n not in _NOT_NAMES]
                name = names[0] if names else head.strip()
                start = begin + len(source[begin:]) - len(source[begin:].lstrip())
                scopes.append((name, source.count("\n", 0, start)))
                nested = 1
            else:
                scopes.append(("", 0))
        elif token[0] == "}":
            if nested > 1:
                nested -= 1
            else:
                name, line = scopes.pop()
                if nested:
                    found.append((name, source.count("\n", 0, token.start()) - line + 1))
                nested = 0
        elif token[0] != ";":
            continue
        begin = token.end()
    return found


def loops(source: str) -> list[tuple[int, int]]:
    """(line, lines) of every loop with braces, as clang-format leaves them: a closing brace stands under its loop."""
    text = [line.split("//")[0].rstrip() for line in source.split("\n")]
    found = []
    for start, line in enumerate(text):
        if not (loop := _LOOP.search(line)):
            continue
        head, last = line[loop.start() :], start
        while head.count("(") > head.count(")"):
            last += 1
            head += text[last]
        if head.endswith("{"):
            indent = line[: len(line) - len(line.lstrip())]
            end = next(i for i in range(last + 1, len(text)) if text[i].startswith(f"{indent}}}"))
            found.append((start + 1, end - start + 1))
    return found
