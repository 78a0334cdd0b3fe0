"""Text and tokenizer of the demo: fetched once with pip, cut once, kept as an array of ids.

Text is English Wikipedia (test data inside the `gensim` wheel); the tokenizer is a real language
model's vocabulary of 151 643 byte pairs (inside the `dashscope` wheel), applied with `tiktoken`.
What can't be had is replaced: the text by the Python standard library's sources, the tokenizer by
a table of the text's own words. `Corpus.source` always says what was used. Files go to the cache
folder (`ZENSYNC_DATA`, else ./data) and are used from there without a network.
"""

from __future__ import annotations

import ast
import base64
import bz2
import html
import importlib.util
import io
import json
import os
import re
import subprocess
import sys
import sysconfig
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from xml.etree import ElementTree

import numpy
import numpy.typing

Say = Callable[[str], None]
Tokens = numpy.typing.NDArray[numpy.int32]

_TEXT_WHEEL = "gensim==4.4.0"
_TEXT_MEMBER = re.compile(r"gensim/test/test_data/enwiki-latest.*-shortened\.bz2")
_VOCABULARY_WHEEL = "dashscope==2.0.2"
_VOCABULARY_MEMBER = "dashscope/resources/qwen.tiktoken"
_PATTERN_MEMBER = "dashscope/tokenizers/qwen_tokenizer.py"
_FETCH_TIMEOUT_S = 300
_REAL_NAME = "corpus"
_STDLIB_BYTES = 8_000_000
_PIECE_CHARS = 50_000  # the tokenizer's time and stack grow with the length of one call


@dataclass(frozen=True)
class Corpus:
    """A text as token ids, where they lie, and what they were made from."""

    tokens_file: str
    n_tokens: int
    vocabulary: int
    source: str

    @property
    def is_real(self) -> bool:
        """Whether text and tokenizer are those that were wanted, not replacements."""
        return Path(self.tokens_file).stem == _REAL_NAME

    def load(self) -> Tokens:
        """The ids, mapped from the file: ranks of one machine share the memory."""
        tokens: Tokens = numpy.load(self.tokens_file, mmap_mode="r")
        return tokens


def data_folder(given: str | Path | None = None) -> Path:
    """Where fetched and derived files are kept: as given, else ZENSYNC_DATA, else ./data."""
    return Path(given or os.environ.get("ZENSYNC_DATA") or "data").resolve()


def prepare(folder: Path, *, offline: bool = False, say: Say | None = None) -> Corpus:
    """The corpus in `folder`, made (and fetched, unless `offline`) if it isn't there yet.

    A corpus made from replacements is tried again with the network the next time.
    """
    say = say or _be_silent
    folder.mkdir(parents=True, exist_ok=True)
    wanted = folder / f"{_REAL_NAME}.json"
    if wanted.exists():
        known = Corpus(**json.loads(wanted.read_text()))
        return replace(known, tokens_file=str(folder / known.tokens_file))
    text, text_name, real_text = _text(folder, offline, say)
    tokens, vocabulary, tokenizer, real_tokenizer = _cut(folder, text, offline, say)
    name = _REAL_NAME if real_text and real_tokenizer else "substitute"
    path = folder / f"{name}.npy"
    # Written aside and renamed: a killed set-up must not leave half a file.
    partial = folder / f"{name}.{os.getpid()}.npy"
    numpy.save(partial, tokens)
    partial.replace(path)
    source = f"{text_name}; {tokenizer}"
    # Only the file's name is kept, so that the folder can be moved.
    corpus = Corpus(path.name, int(tokens.size), vocabulary, source)
    (folder / f"{name}.json").write_text(json.dumps(asdict(corpus), indent=1))
    say(f"{corpus.n_tokens:,} tokens, vocabulary {vocabulary:,} ({source})")
    return replace(corpus, tokens_file=str(path))


def _be_silent(_text: str) -> None:
    pass


def _fetch(requirement: str, folder: Path, say: Say) -> Path | None:
    """The wheel of `requirement`, from the cache or by pip; None if it can't be had."""
    stem = requirement.replace("==", "-")
    wheels = folder / "wheels"
    found = sorted(wheels.glob(f"{stem}-*.whl"))
    if not found:
        say(f"fetching {requirement} with pip (once)")
        # Only data is taken from the wheels, so that any machine may use one fixed platform's.
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        command += ["--disable-pip-version-check", "--only-binary=:all:", "--no-input"]
        command += ["--retries", "1", "--timeout", "20"]
        command += ["--python-version", "3.11", "--platform", "manylinux_2_28_x86_64"]
        command += ["--dest", str(wheels), requirement]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, check=False, timeout=_FETCH_TIMEOUT_S
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            say(f"{requirement} could not be fetched: {error}")
            return None
        if done.returncode != 0:
            last = (done.stderr.strip().splitlines() or ["pip said nothing"])[-1]
            say(f"{requirement} could not be fetched: {last}")
            return None
        found = sorted(wheels.glob(f"{stem}-*.whl"))
    return found[0] if found else None


def _text(folder: Path, offline: bool, say: Say) -> tuple[str, str, bool]:
    """Text, its name, and whether it is the one that was wanted."""
    wheel = None if offline else _fetch(_TEXT_WHEEL, folder, say)
    if wheel is not None:
        with zipfile.ZipFile(wheel) as archive:
            members = [name for name in archive.namelist() if _TEXT_MEMBER.fullmatch(name)]
            if members:
                text = "\n\n".join(_articles(bz2.decompress(archive.read(members[0]))))
                return text, f"English Wikipedia, {len(text) / 1e6:.1f} MB", True
        say(f"{wheel.name} holds no Wikipedia text")
    text = _stdlib_sources()
    return text, f"the Python standard library's sources, {len(text) / 1e6:.1f} MB", False


def _stdlib_sources() -> str:
    parts: list[str] = []
    size = 0
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py")):
        if "site-packages" in path.parts:
            continue
        parts.append(path.read_text(encoding="utf-8", errors="replace"))
        size += len(parts[-1])
        if size > _STDLIB_BYTES:
            break
    return "\n\n".join(parts)


def _articles(dump: bytes) -> Iterator[str]:
    """The articles of a MediaWiki dump, as plain text; redirects are left out."""
    for _, element in ElementTree.iterparse(io.BytesIO(dump)):
        if element.tag.endswith("}text") and element.text:
            if not element.text.lstrip().lower().startswith("#redirect"):
                yield plain_text(element.text)
            element.clear()


# In this order: what contains other markup goes first; templates and tables nest, so that the
# innermost are taken until none is left.
_NESTED = (re.compile(r"\{\{[^{}]*\}\}"), re.compile(r"\{\|(?:(?!\{\||\|\}).)*\|\}", re.DOTALL))
_RULES: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern, re.DOTALL | re.IGNORECASE), by)
    for pattern, by in (
        (r"<!--.*?-->", ""),
        (r"<ref[^>]*/>", ""),
        (r"<(ref|math|gallery|timeline|imagemap|source|syntaxhighlight)\b.*?</\1\s*>", ""),
        (r"</?[a-z][^<>]*>", ""),
    )
)
_LINKS: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern, re.IGNORECASE | re.MULTILINE), by)
    for pattern, by in (
        (r"\[\[(?:file|image|category):(?:[^\[\]]|\[\[[^\[\]]*\]\])*\]\]", ""),
        (r"\[\[(?:[^\[\]|]*\|)?([^\[\]]*)\]\]", r"\1"),
        (r"\[(?:https?:)?//\S+ ?([^\]]*)\]", r"\1"),
        (r"'{2,}", ""),
        (r"^=+\s*(.*?)\s*=+\s*$", r"\1"),
        (r"^[*#:;]+ *", ""),
        (r"__[a-z]+__", ""),
        (r"\n{3,}", "\n\n"),
    )
)


def plain_text(markup: str) -> str:
    """Wiki markup with templates, tables, references, images and emphasis taken out."""
    text = html.unescape(markup)
    for pattern, by in _RULES:
        text = pattern.sub(by, text)
    for nested in _NESTED:
        count = 1
        while count:
            text, count = nested.subn("", text)
    for pattern, by in _LINKS:
        text = pattern.sub(by, text)
    return text.strip()


def _cut(folder: Path, text: str, offline: bool, say: Say) -> tuple[Tokens, int, str, bool]:
    """Ids, size of the vocabulary, the tokenizer's name, and whether it is the wanted one."""
    if importlib.util.find_spec("tiktoken") is None:
        say("tiktoken is not installed: the text's own words are the vocabulary")
    else:
        wheel = None if offline else _fetch(_VOCABULARY_WHEEL, folder, say)
        if wheel is not None:
            tokens, size = _byte_pairs(wheel, text)
            return tokens, size, f"Qwen's byte pairs, {size:,}", True
    tokens, size = _words(text)
    return tokens, size, f"a table of its own {size:,} words (no tokenizer at hand)", False


def _byte_pairs(wheel: Path, text: str) -> tuple[Tokens, int]:
    import tiktoken

    with zipfile.ZipFile(wheel) as archive:
        lines = archive.read(_VOCABULARY_MEMBER).splitlines()
        pattern = _constant(archive.read(_PATTERN_MEMBER).decode(), "PAT_STR")
    ranks = {base64.b64decode(token): int(rank) for token, rank in map(bytes.split, lines)}
    encoding = tiktoken.Encoding("demo", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    # Cut at line ends only: a break inside a word would make tokens that the text doesn't have.
    ids: list[int] = []
    piece: list[str] = []
    size = 0
    for line in text.splitlines(keepends=True):
        piece.append(line)
        size += len(line)
        if size > _PIECE_CHARS:
            ids += encoding.encode_ordinary("".join(piece))
            piece, size = [], 0
    ids += encoding.encode_ordinary("".join(piece))
    return numpy.asarray(ids, dtype=numpy.int32), len(ranks)


def _constant(source: str, name: str) -> str:
    """The value of a module's string constant, read without running the module."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", None) == name:
            return str(ast.literal_eval(node.value))
    raise ValueError(f"no constant {name}")


def _words(text: str) -> tuple[Tokens, int]:
    """Words and punctuation marks as ids, the commonest first, as tokenizers number them."""
    words = re.findall(r"\w+|[^\w\s]", text)
    order = {word: i for i, (word, _) in enumerate(Counter(words).most_common())}
    ids = numpy.fromiter((order[word] for word in words), numpy.int32, len(words))
    return ids, len(order)
