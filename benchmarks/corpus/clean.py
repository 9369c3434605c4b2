"""Files of packages to plain text: which are read, what is removed from them, and which are refused."""

import gzip
import html
import re
import zlib
from collections import Counter
from collections.abc import Sequence

HTML = (".html", ".htm", ".xhtml")
PROSE = (
    *(".txt", ".rst", ".md", ".texi", ".texinfo", ".info", ".pod", ".adoc", ".asciidoc", ".org", ".tex"),
    *(".page", ".dict"),
)
CODE = (
    *(".c", ".h", ".cc", ".cpp", ".cxx", ".hpp", ".py", ".go", ".rs", ".java", ".pl", ".pm", ".el", ".lisp"),
    *(".scm", ".rkt", ".js", ".ts", ".sh", ".ml", ".hs", ".pas", ".pp", ".inc", ".m2", ".php", ".erl", ".rb"),
    *(".f90", ".f", ".adb", ".ads", ".y", ".l", ".awk", ".tcl", ".cmake", ".yml", ".yaml", ".sql", ".vim"),
    *(".gd", ".gi", ".g", ".m", ".jl", ".lua"),
)
MAN = re.compile(r"/man/man\d[^/]*/[^/]+$")
NESTED = (".tar.xz", "/src.zip")  # sources inside of packages
REFUSED = re.compile(
    r"(^|/)(_sources|testsuite|locales?|i18n|po|vendor|node_modules|asic_reg|fixtures|genindex[^/]*|search\.html"
    r"|(copying|license|licence|copyright|changelog|changes|news|authors|thanks|maintainers)[^/]*"
    r"|[^/]*\.min\.js)(/|$)",
    re.IGNORECASE,
)
# Documentation in other languages, as a directory or as in index.fr.html
OTHER_LANGUAGE = re.compile(
    r"(/|\.)(ar|bg|ca|cs|da|de|el|es|et|eu|fa|fi|fr|gl|he|hr|hu|id|it|ja|ko|lt|lv|nb|nl|nn|oc|pl|pt|ro|ru|sk|sl|sr"
    r"|sv|ta|th|tr|uk|vi|zh)([-_][A-Za-z]{2,4})?(/|\.(html?|txt|page)(\.gz)?$)"
)
GENERATED = re.compile(r"generated (automatically|by|from|using)|auto-?generated|do not edit", re.IGNORECASE)
LICENCE = re.compile(r"licen[cs]e|copyright|SPDX|all rights reserved", re.IGNORECASE)
OPENING_COMMENT = re.compile(
    r"\s*(/\*.*?\*/|\{-.*?-\}|\(\*.*?\*\)|<!--.*?-->"
    r'|(?:^[ \t]*(?:#|//|;|%|--|dnl\b|@c\b|\.\\"|\.\. )[^\n]*\n)+)\n?',
    re.DOTALL | re.MULTILINE,
)
ENGLISH = frozenset("the of and to a in is for".split())

MIN_CHARACTERS, MAX_BYTES = 400, 2 << 20
MAX_CODE_LINE = 1000
LEAST_ENGLISH = 0.06  # share of the words of prose
LEAST_COMPRESSED = 0.13  # of its size: tables and lists of constants are below
LEAST_LETTERS = 0.5  # of what is not white space


def suffix_of(path: str) -> str:
    """Return the suffix of a path in lower case, without that of a compressed file."""
    name = path.lower().removesuffix(".gz").removesuffix(".dz")
    return name[name.rfind(".") :] if "." in name.rsplit("/", 1)[-1] else ""


def is_read(path: str) -> bool:
    """Whether files of this path are documents, as far as the path tells."""
    known = suffix_of(path) in (*HTML, *PROSE, *CODE) or MAN.search(path)
    return bool(known) and not REFUSED.search(path) and not OTHER_LANGUAGE.search(path)


def documents(path: str, data: bytes) -> list[str]:
    """Return the cleaned texts of a file: mostly one, none if the file is refused."""
    if path.endswith((".gz", ".dz")):
        data = gzip.decompress(data)
    text, suffix = data.decode(errors="replace").replace("\r\n", "\n"), suffix_of(path)
    if text.count("\ufffd") > len(text) // 1000:
        return []
    text = text.replace("\ufffd", "")
    if suffix in CODE:
        return [clean] if (clean := clean_code(text)) and is_varied(clean) else []
    if MAN.search(path):
        texts = [from_man(text)]
    elif suffix in HTML or suffix == ".page":
        texts = [from_html(text)]
    elif suffix == ".dict":
        texts = cut(text)
    else:
        texts = [text]
    return [clean for text in texts if is_prose(clean := tidy(text)) and is_varied(clean)]


def clean_code(text: str) -> str:
    """Return code without the comments on its licence; empty for code that a program wrote."""
    if GENERATED.search(text[:2000]) or max(map(len, text.split("\n"))) > MAX_CODE_LINE:
        return ""
    while (comment := OPENING_COMMENT.match(text)) and LICENCE.search(comment[0]):
        text = text[comment.end() :]
    return tidy(text)


def tidy(text: str) -> str:
    """Return text without control characters, trailing spaces and more than one empty line in a row."""
    text = re.sub(r"[^\S\n\t]+$|[\x00-\x08\x0b-\x1f\x7f-\x9f\ufeff]", "", text, flags=re.MULTILINE)
    return re.sub(r"\n{3,}", "\n\n", text).strip("\n") + "\n"


def is_prose(text: str) -> bool:
    """Whether a text is English, by its commonest words."""
    words = re.findall(r"[A-Za-z]+", text)
    return sum(word.lower() in ENGLISH for word in words) >= LEAST_ENGLISH * max(1, len(words))


def is_varied(text: str) -> bool:
    """Whether a text is long enough, consists of letters, and does not repeat itself throughout."""
    if len(text) < MIN_CHARACTERS or len(text) > MAX_BYTES:
        return False
    part = text[: 1 << 16]
    visible = "".join(part.split())
    ascii_letters = sum(map(len, re.findall(r"[A-Za-z]+", visible)))
    coded = part.encode()
    return ascii_letters >= LEAST_LETTERS * len(visible) and len(
        zlib.compress(coded, 1)
    ) >= LEAST_COMPRESSED * len(coded)


def from_html(page: str) -> str:
    """Return the text of a page: paragraphs, headings and preformatted blocks."""
    page = re.sub(
        r"<(script|style|head|nav|svg|math|footer|header)\b.*?</\1\s*>|<!--.*?-->",
        " ",
        page,
        flags=re.DOTALL | re.IGNORECASE,
    )
    pieces = re.split(r"<pre\b[^>]*>(.*?)</pre\s*>", page, flags=re.DOTALL | re.IGNORECASE)
    for number, piece in enumerate(pieces):
        if number % 2 == 0:  # outside of <pre>, white space only separates words
            piece = re.sub(r"[ \t]*\n[ \t]*", "\n", re.sub(r"[ \t]+", " ", piece))
            piece = re.sub(r"\n+", "\n", piece)
            piece = re.sub(
                r"\s*</?(p|div|h\d|dl|ul|ol|table|section|article|blockquote|title|note)\b[^>]*>\s*",
                "\n\n",
                piece,
                flags=re.IGNORECASE,
            )
            piece = re.sub(r"\s*<(br|li|tr|dt|dd|item)\b[^>]*>\s*", "\n", piece, flags=re.IGNORECASE)
        else:
            piece = f"\n\n{piece}\n\n"
        pieces[number] = html.unescape(re.sub(r"<[^>]*>", "", piece))
    return "".join(pieces).replace("\u00a0", " ").replace("¶", "")


_MAN_MACROS = re.compile(
    r"""^[.'][ \t]*(?:(SH|SS|Sh|Ss)\b[ ]*(.*)|(?:B|I|BR|RB|IR|RI|BI|IB|SM|SB|TP|IP|It|Nm|Fl|Ar|Pa|Fn|Va|Xr"""
    r"""|Cm|Dv|Em|Li|Ev|Er|Vt|Ft|Fa|Sq|Dq|Ql|Op|Pq|Nd|Ic|Sy|Q)\b[ ]*(.*)|(PP|Pp|LP|P|sp)\b.*|.*)$"""
)
_MDOC_INSIDE = re.compile(
    r"(?:^|(?<= ))(?:Fa|Va|Dv|Cm|Pa|Fl|Ar|Xr|Ev|Li|Sy|Em|Fn|Er|Ic|Nm|Ns|Oc|Oo|Op) (?=\S)"
)
_MAN_ESCAPES = {"-": "-", "e": "\\", "&": "", "|": "", "^": "", " ": " ", "%": "", "/": "", ",": "", "c": ""}
_MAN_NAMES = {"bu": "*", "em": "--", "en": "-"}
_MAN_NAMES |= dict.fromkeys(("aq", "oq", "cq"), "'") | dict.fromkeys(("dq", "lq", "rq"), '"')


def from_man(source: str) -> str:
    """Return the text of a manual page, from man or mdoc macros; the words of unknown macros are dropped."""
    lines = []
    for line in source.split("\n"):
        if line.startswith((".", "'")):
            found = _MAN_MACROS.match(line)
            assert found is not None, "the last alternative matches any line"
            heading, words, paragraph = found[2], found[3], found[4]
            if found[1]:
                line = f"\n{heading}"
            elif paragraph:
                line = ""
            elif words:
                line = _MDOC_INSIDE.sub("", words)
            else:
                continue
            line = line.replace('"', "")
        line = re.sub(r"\\f(\[[^]]*\]|\(..|.)|\\s[-+]?\d|\\\".*", "", line)
        line = re.sub(r"\\\((..)|\\\[([^]]+)\]", lambda name: _MAN_NAMES.get(name[1] or name[2], ""), line)
        lines.append(re.sub(r"\\(.)", lambda mark: _MAN_ESCAPES.get(mark[1], ""), line))
    return "\n".join(lines)


def cut(text: str, size: int = 1 << 15) -> list[str]:
    """Cut a dictionary between its entries into texts of about `size` characters."""
    texts, held, length = [], [], 0
    for entry in re.split(r"\n(?=\S)", text):
        held.append(entry)
        length += len(entry)
        if length >= size:
            texts.append("\n".join(held))
            held, length = [], 0
    return [*texts, "\n".join(held)]


def without_menus(pages: Sequence[str], share: float = 0.3, least: int = 20) -> list[str]:
    """Return a package's pages without the lines that many of them have."""
    counts = Counter(line for page in pages for line in set(page.split("\n")) if line.strip())
    limit = max(least, share * len(pages))
    often = {line for line, count in counts.items() if count > limit}
    return [tidy("\n".join(line for line in page.split("\n") if line not in often)) for page in pages]


def topic(path: str) -> str:
    """Return a folder and a name, which a page shares with the source that it was made from."""
    return "/".join(path.removesuffix(".gz").rsplit(".", 1)[0].split("/")[-2:])
