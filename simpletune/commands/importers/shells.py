"""Read command files of sh, cmd and PowerShell, none of which is run: the words of each command, after variables,
conditions and loops that depend on nothing outside the file.

A file is split into statements by its shell's own rules (quotes, comments, joined lines, separators), the statements
into blocks, and these are gone through in order. A condition about the machine (does a file exist?) is not decided:
commands below it are read, assignments are not, and a command that uses such a variable says so.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from simpletune.system.strict_json import MAX_DEPTH

MOST_TEXT = 2**16  # characters of a command
MOST_VALUES = 2**20  # characters that all variables together stand for, wherever they are used
MOST_READ = 2**20  # characters of all statements, loops unrolled, and STEP more for each
STEP = 8
MOST_OF_CONDITION = 200  # tokens of a condition of cmd before its bracket
COMPUTED = "only its shell can compute it, or ask for it"
REDIRECTION = r"""(?:(?<![^\s;&|])[\d*&])?(?:<<<|>>|>\||>|<)[ \t]*(?:&[\d-]|"[^"\n]*"|'[^'\n]*'|[^\s"'&|;<>()]+)"""
PAIRS = {"(": ")", "{": "}", "[": "]"}
QUOTES = ("'", '"', "`")
NUMBER = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?")


class TooLong(ValueError):
    """Report a command file that is too long, or grows so by its variables or loops."""


@dataclass(frozen=True)
class Statement:
    """Text of a command, and ``&&``, ``||``, ``|`` or nothing before it."""

    text: str
    operator: str
    line: int


@dataclass(frozen=True)
class Branch:
    """``if``: conditions, of which none means else, and what they guard."""

    arms: list[tuple[list[Statement], list[Node]]]


@dataclass(frozen=True)
class Loop:
    """``for`` over the words of a text; without a name, a loop or a branch whose condition is not read."""

    name: str
    values: str
    body: list[Node]


Node = Statement | Branch | Loop


@dataclass(frozen=True)
class Command:
    """Words of a command, what is to be said about variables in it, by their names, and its line."""

    words: list[str]
    notes: dict[str, str]
    line: int


@dataclass
class Blocks:
    """Blocks of a file, as they open and close."""

    open: list[Branch | Loop] = field(default_factory=list)
    whole: list[Node] = field(default_factory=list)
    inline: list[int] = field(default_factory=list)  # depths at which a block ends with its line

    @property
    def nodes(self) -> list[Node]:
        """Where the next node belongs."""
        if not self.open:
            return self.whole
        block = self.open[-1]
        return block.body if isinstance(block, Loop) else block.arms[-1][1]

    def enter(self, block: Branch | Loop, inline: bool = False) -> None:
        if len(self.open) == MAX_DEPTH:
            raise RecursionError
        self.nodes.append(block)
        self.open.append(block)
        if inline:
            self.inline.append(len(self.open))

    def otherwise(self, conditions: list[Statement], inline: bool = False) -> None:
        """Open another arm of the ``if`` that has just closed."""
        last = self.nodes[-1] if self.nodes else None
        if isinstance(last, Branch):
            self.nodes.pop()
            self.enter(last, inline)
            last.arms.append((conditions, []))
        else:
            self.enter(Loop("", "", []), inline)

    def leave(self) -> None:
        if self.open:
            self.open.pop()

    def end_line(self) -> None:
        while self.inline:
            del self.open[self.inline.pop() - 1 :]


@dataclass
class Bounds:
    """What may still be read, of a file and of the shells that it calls."""

    values: int = MOST_VALUES
    statements: int = MOST_READ


class Shell:
    """What the three shells share: variables, and going through blocks."""

    def __init__(self, bounds: Bounds | None = None) -> None:
        self.bounds = bounds or Bounds()
        self.variables: dict[str, list[str]] = {}
        self.notes: dict[str, str] = {}
        self._unknown: dict[str, str] = {}  # what is not known of variables, by their names

    def read(self, text: str) -> Iterator[Command]:
        """Yield a file's commands. Raises TooLong if it exceeds a bound, RecursionError if blocks are too deep."""
        yield from self._run(self.blocks(text.replace("\r\n", "\n")), True)

    def blocks(self, text: str) -> list[Node]:
        raise NotImplementedError

    def simple(self, text: str, sure: bool) -> list[str]:
        """Carry out an assignment, unless it is not sure; return the words of any other command."""
        raise NotImplementedError

    def holds(self, text: str) -> bool | None:
        """Return whether a condition holds; None if the file alone does not tell."""
        raise NotImplementedError

    def words_of(self, text: str) -> list[str]:
        raise NotImplementedError

    def items(self, text: str) -> list[str]:
        """Return what a loop goes through."""
        return self.words_of(text)

    def _run(self, nodes: list[Node], sure: bool) -> Iterator[Command]:
        done: bool | None = True  # whether the last command succeeded
        for node in nodes:
            self._read(STEP + (len(node.text) if isinstance(node, Statement) else 0))
            if isinstance(node, Loop):
                for value in self.items(node.values) if node.name else [""]:
                    if node.name:
                        self.set(node.name, [value], sure)
                    yield from self._run(node.body, sure and bool(node.name))
            elif isinstance(node, Branch):
                known = sure
                for conditions, body in node.arms:
                    holds = self._all_hold(conditions)
                    known = known and holds is not None
                    if holds is not False:
                        yield from self._run(body, known)
                    if holds:
                        break
            elif (node.operator, done) not in (("&&", False), ("||", True)):
                _require_short(node.text)
                known = sure and (done is not None or node.operator not in ("&&", "||"))
                done = self.holds(node.text) if self.is_test(node.text) else True
                self.notes = {}
                if words := self.simple(node.text, known):
                    _require_short(" ".join(words))
                    yield Command(words, self.notes, node.line)

    def is_test(self, text: str) -> bool:
        return False

    def _all_hold(self, conditions: list[Statement]) -> bool | None:
        found: bool | None = True
        for each in conditions:
            if (each.operator, found) in (("&&", False), ("||", True)):
                continue
            one = self.holds(each.text)
            found = None if found is None and not (each.operator == "||" and one) else one
        return found

    def set(self, name: str, value: list[str], sure: bool, more: bool = False) -> None:
        if not sure:
            self._unknown[name] = "set under a condition that the file alone does not decide"
            return
        self._unknown.pop(name, None)
        if more:
            value = self.variables.get(name, []) + value
        self.variables[name] = value

    def _value(self, name: str, shown: str) -> list[str] | None:
        """Return a variable's value; None if it has none here, which is noted."""
        found = self.variables.get(name)
        if name in self._unknown:
            self.notes[shown] = self._unknown[name]
        elif found is None:
            self.notes[shown] = "the file gives it no value"
        for each in found or ():
            self._spend(each, shown)
        return found

    def _read(self, characters: int) -> None:
        self.bounds.statements -= characters
        if self.bounds.statements < 0:
            raise TooLong(f"its commands and loops come to more than {MOST_READ:,} characters. Write the command out")

    def _spend(self, value: str, name: str) -> None:
        self.bounds.values -= len(value) + 1  # before they are joined: variables of variables double with every line
        if self.bounds.values < 0:
            raise TooLong(
                f"its variables stand for more than {MOST_VALUES:,} characters, up to {name}. Write the command out"
            )

    def _compare(self, left: str, operator: str, right: str) -> bool | None:
        """Compare as text or, where the operator asks for it, as numbers."""
        if operator in ("==", "=", "!="):
            return (left == right) == (operator != "!=")
        numbers = [float(each or "0") for each in (left, right) if NUMBER.fullmatch(each or "0")]
        if len(numbers) < 2:
            return None
        return {
            "eq": numbers[0] == numbers[1], "ne": numbers[0] != numbers[1], "lt": numbers[0] < numbers[1],
            "le": numbers[0] <= numbers[1], "gt": numbers[0] > numbers[1], "ge": numbers[0] >= numbers[1],
        }.get(operator)  # fmt: skip


def _joined(tokens: list[str]) -> str:
    """Join a statement without the blanks around it; an escaped one at its end stays."""
    while tokens and tokens[-1].isspace():
        tokens.pop()
    whole = "".join(tokens).lstrip()
    _require_short(whole)
    return whole


def _require_short(command: str) -> None:
    if len(command) > MOST_TEXT:
        raise TooLong(f"a command of {len(command):,} characters. Use at most {MOST_TEXT:,}")


def end_of_quote(text: str, at: int, escape: str) -> int:
    """Return the place after the quote that closes the one at a place; -1 if none does."""
    quote, place = text[at], at + 1
    while (place := text.find(quote, place)) >= 0:
        before = place
        while quote != "'" and before > at + 1 and text[before - 1] == escape:
            before -= 1
        if (place - before) % 2 == 0:
            return place + 1
        place += 1
    return -1


def end_of_bracket(text: str, at: int, escape: str) -> int:
    """Return the place after the bracket that closes the one at a place, outside quotes; -1 if none does."""
    expected = [PAIRS[text[at]]]
    place = at + 1
    while place < len(text):
        char = text[place]
        if char == escape:
            place += 2
            continue
        if char in "'\"":
            place = end_of_quote(text, place, escape)
            if place < 0:
                return -1
            continue
        if char in PAIRS:
            expected.append(PAIRS[char])
        elif char == expected[-1]:
            expected.pop()
            if not expected:
                return place + 1
        place += 1
    return -1


def split_outside(text: str, separators: str, escape: str) -> list[str]:
    """Split a text at separators outside quotes and brackets."""
    parts, start, place, broken = [], 0, 0, False
    while place < len(text):
        char = text[place]
        if char == escape:
            place += 2
            continue
        end = 0
        if char in "'\"" and not broken:
            end = end_of_quote(text, place, escape)
        elif char in PAIRS and not broken:
            end = end_of_bracket(text, place, escape)
        elif char in separators:
            parts.append(text[start:place])
            start = place + 1
        broken = broken or end < 0  # what never closes is looked for once
        place = end if end > 0 else place + 1
    return [*parts, text[start:]]


class Tokenised(Shell):
    """sh and PowerShell, whose quotes may span lines: the same tokens make statements and words."""

    TOKENS: re.Pattern[str]
    ESCAPE: str

    def tokens(self, text: str) -> Iterator[tuple[str, str]]:
        """Yield kinds and texts; a bracket is one token with all that is in it. ``lost`` is the rest of a line after
        a quote or bracket that never closes; ``skipped`` the lines of a here-document."""
        place, broken = 0, False
        ends: list[str] = []
        while place < len(text):
            found = self.TOKENS.match(text, place)
            assert found is not None and found.lastgroup is not None, "the last alternative takes any character"
            kind, end = found.lastgroup, found.end()
            if kind == "bracket":
                end = -1 if broken else end_of_bracket(text, end - 1, self.ESCAPE)
                broken = broken or end < 0
            elif kind == "here":
                end = -1 if broken else text.find(f"\n{found['mark']}@", end - 1) + 3
                broken = broken or end < 3
                end = end if end > 2 else -1
            if end < 0 or (kind == "text" and found[0] in QUOTES):
                kind, end = "lost", text.find("\n", place)
                end = len(text) if end < 0 else end
            if kind == "document":
                ends.append(found["end"])
            yield kind, text[place:end]
            place = end
            if kind == "newline":
                for closing in ends:
                    last = re.compile(rf"^[ \t]*{re.escape(closing)}[ \t]*$", re.MULTILINE).search(text, place)
                    end = len(text) if last is None else last.end()
                    yield "skipped", text[place:end]
                    place = end
                ends.clear()

    def statements(self, text: str) -> Iterator[Statement]:
        """Yield statements; brackets that group them are statements of their own."""
        parts: list[str] = []
        operator, line, started = "", 1, 0
        for kind, token in self.tokens(text):
            if kind in ("join", "comment", "remark", "document", "skipped"):
                pass
            elif kind == "redirection":
                parts.append(" ")
            elif kind == "newline" and self.goes_on(parts):
                parts.append(" ")
            elif kind == "lost":
                parts.clear()
            elif kind in ("newline", "operator", "group"):
                if whole := _joined(parts):
                    yield Statement(whole, operator, started)
                    operator = ""
                if kind == "group":
                    yield Statement(token, "", line)
                elif kind == "operator":
                    operator = token if token in ("&&", "||") else ""
                parts, started = [], 0
            else:
                started = started or (line if kind != "space" else 0)
                parts.append(token)
            line += token.count("\n")
        if whole := _joined(parts):
            yield Statement(whole, operator, started)

    def goes_on(self, parts: list[str]) -> bool:
        """Return whether a statement goes on in the next line without a mark."""
        return False

    def pieces(self, text: str) -> Iterator[list[tuple[str, str]]]:
        """Yield the tokens of each word."""
        word: list[tuple[str, str]] = []
        for kind, token in self.tokens(text):
            if kind in ("space", "newline", "comment", "remark", "lost", "skipped"):
                if word:
                    yield word
                word = []
            elif kind != "join":
                word.append((kind, token))
        if word:
            yield word


class Sh(Tokenised):
    """bash and its kin."""

    ESCAPE = "\\"
    TOKENS = re.compile(
        rf"""(?P<join>\\\n)|(?P<escape>\\.?)|(?P<newline>\n)|(?P<space>[^\S\n]+)|(?P<comment>(?<![^\s;&|()])\#[^\n]*)
        |(?P<single>'[^']*')|(?P<double>"(?:[^"\\]|\\.)*+")|(?P<back>`[^`]*`)
        |(?P<document><<-?[ \t]*(?P<mark>['"]?)(?P<end>[\w.-]+)(?P=mark)(?=[^\w.-]|$))|(?P<redirection>{REDIRECTION})
        |(?P<operator>&&|\|\||;;|[;&|])|(?P<bracket>\$\(|\$\{{|(?<==)\()|(?P<group>[()])
        |(?P<variable>\$(?:\w+|[@*]))|(?P<text>[^\s'"`\\\#;&|()<>$]+|.)""",
        re.VERBOSE | re.DOTALL,
    )
    VARIABLE = re.compile(
        r"""\\(?P<escaped>[\\"$`\n])|\$(?P<plain>\w+|[@*])
        |\$\{(?P<name>\w+|[@*])(?:\[(?P<index>[@*]|\d{1,6})\])?(?:(?P<operator>:?[-=])(?P<default>(?:[^{}]|\{[^{}]*\})*+))?\}""",
        re.VERBOSE,
    )
    ASSIGNMENT = re.compile(r"(\w+)(\+?)=(.*)", re.DOTALL)
    KEYWORD = re.compile(r"(if|then|elif|else|fi|for|while|until|do|done|case|esac|function|[{}!])(?:\s+|$)")
    FOR = re.compile(r"(\w+)\s+in\s+(.*)", re.DOTALL)
    DECLARES = ("export", "declare", "local", "readonly", "typeset")
    _unset_is_empty = False

    def blocks(self, text: str) -> list[Node]:
        blocks = Blocks()
        conditions: list[Statement] | None = None
        for each in self.statements(text):
            rest = each.text
            while rest and (found := self.KEYWORD.match(rest)) is not None:
                word, rest = found[1], rest[found.end() :]
                if word == "if":
                    conditions = []
                    blocks.enter(Branch([(conditions, [])]))
                elif word in ("elif", "else") and blocks.open and isinstance(blocks.open[-1], Branch):
                    one: list[Statement] = []
                    blocks.open[-1].arms.append((one, []))
                    conditions = one if word == "elif" else None
                elif word in ("then", "do"):
                    conditions = None
                elif word in ("fi", "done", "esac"):
                    blocks.leave()
                elif word == "for" and (of := self.FOR.fullmatch(rest)) is not None:
                    blocks.enter(Loop(of[1], of[2], []))
                    rest = ""
                elif word in ("for", "while", "until", "case"):
                    blocks.enter(Loop("", "", []))
                    conditions = None if word == "case" else []
                    rest = "" if word in ("for", "case") else rest
            if rest:
                (blocks.nodes if conditions is None else conditions).append(Statement(rest, each.operator, each.line))
        return blocks.whole

    def simple(self, text: str, sure: bool) -> list[str]:
        words = list(self.pieces(text))
        declares = bool(words) and len(words[0]) == 1 and words[0][0][1] in self.DECLARES
        given = []
        while words and (
            (declares and words[0][0][1].startswith(("-", *self.DECLARES)))
            or (words[0][0][0] == "text" and self.ASSIGNMENT.fullmatch(words[0][0][1]))
        ):
            given.append(words.pop(0))
        if words:  # assignments before a command are for it alone
            return [] if declares else [part for word in words for part in self._expand(word)]
        for (_, first), *more in given:
            if (found := self.ASSIGNMENT.fullmatch(first)) is None:
                continue
            name, adds = found[1], bool(found[2])
            if more and more[0][1].startswith("("):
                self.set(name, self.words_of(more[0][1][1:-1]), sure, adds)
                continue
            value = "".join(self._expand([("text", found[3]), *more], split=False))
            if adds and name in self.variables and name not in self._unknown:
                value = "".join(self._value(name, name) or [])[:MOST_TEXT] + value
            self.set(name, [value], sure)
            if sure and any(kind in ("bracket", "back") and token.startswith(("$(", "`")) for kind, token in more):
                self._unknown[name] = COMPUTED
        return []

    def words_of(self, text: str) -> list[str]:
        return [part for word in self.pieces(text) for part in self._expand(word)]

    def _expand(self, word: list[tuple[str, str]], split: bool = True) -> list[str]:
        """Substitute variables in a word; what stands outside quotes is split at blanks."""
        done: list[str] = []
        current: str | None = None
        for kind, token in word:
            if kind in ("escape", "single"):
                current = (current or "") + (token[1:] if kind == "escape" else token[1:-1])
                continue
            quoted = kind == "double"
            inner, place = token[1:-1] if quoted else token, 0
            if quoted and not inner:
                current = current or ""
            for found in self.VARIABLE.finditer(inner):
                if found["escaped"] and not quoted:
                    continue
                if place < found.start():
                    current = (current or "") + inner[place : found.start()]
                place = found.end()
                if found["escaped"]:
                    current = (current or "") + found["escaped"].strip("\n")
                    continue
                for index, value in enumerate(self._values(found, quoted)):
                    parts = re.split(r"\s+", value) if split and not quoted else [value]
                    for number, part in enumerate(parts):
                        if number or index:
                            done += [] if current is None else [current]
                            current = None
                        if part or quoted or not split:
                            current = (current or "") + part
            if place < len(inner):
                current = (current or "") + inner[place:]
        return done if current is None else [*done, current]

    def _values(self, found: re.Match[str], quoted: bool) -> list[str]:
        name, operator = found["plain"] or found["name"], found["operator"] or ""
        value = [] if name in ("@", "*") else self._value(name, f"${name}")  # no arguments are given to the file
        if operator and (value is None or (operator.startswith(":") and not "".join(value))):
            self.notes.pop(f"${name}", None)
            value = self._expand([("double", f'"{found["default"]}"')])
            self._spend("".join(value), name)
            return value
        if value is None:
            return [""] if self._unset_is_empty else [found[0]]
        if name in ("@", "*") or found["index"] == "@":
            return value
        if found["index"] == "*":
            return [" ".join(value)] if quoted else value
        at = int(found["index"] or 0)
        return value[at : at + 1] or [""]

    def is_test(self, text: str) -> bool:
        return re.match(r"\[|test\s|true$|false$", text) is not None

    def holds(self, text: str) -> bool | None:
        if text in ("true", "false"):
            return text == "true"
        self._unset_is_empty = True
        raw = [word for word in self.pieces(text) if word[0][1] not in ("[", "[[", "test", "]", "]]")]
        words = ["".join(self._expand(word, split=False)) for word in raw]
        self._unset_is_empty = False
        negations = next((at for at, word in enumerate(words) if word != "!"), len(words))
        words = words[negations:]
        found: bool | None = None
        if not self.is_test(text.removeprefix("!").strip()):
            found = None
        elif len(words) == 1:
            found = bool(words[0])
        elif len(words) == 2 and words[0] in ("-z", "-n"):
            found = bool(words[1]) == (words[0] == "-n")
        elif len(words) == 3 and not any(kind == "text" and re.search(r"[*?\[]", token) for kind, token in raw[-1]):
            found = self._compare(words[0], words[1].removeprefix("-"), words[2])
        return None if found is None else found != bool(negations % 2)


class Cmd(Shell):
    """The command interpreter of Windows, which replaces variables before it looks for words."""

    TOKENS = re.compile(
        rf"""\^.|"[^"]*(?:"|$)|(?P<redirection>{REDIRECTION})|(?P<operator>&&|\|\||[&|])|(?P<bracket>[()])
        |[^\^"&|()<>\s]+|\s+|.""",
        re.VERBOSE | re.DOTALL,
    )
    VARIABLE = re.compile(
        r"%(?P<here>~dp0)|%%~?(?P<of_loop>[A-Za-z])(?!\w)|%(?P<all>\*)|%(?P<name>\w[\w.-]*)%|!(?P<late>\w+)!"
    )
    IF = re.compile(
        r"""if\s+(?P<condition>(?:/i\s+)?(?:not\s+)?(?:(?:exist|defined|errorlevel)\s+(?:"[^"]*"|[^\s()"])+
        |(?:"[^"]*"|[^\s"=])*\s*(?:==|(?<=\s)(?:equ|neq|lss|leq|gtr|geq)\s)\s*(?:"[^"]*"|[^\s"()])+))\s*(?P<rest>.*)""",
        re.VERBOSE | re.IGNORECASE | re.DOTALL,
    )
    FOR = re.compile(
        r"for\s+(?P<kind>/.*?\s)?\s*%%?(?P<name>[A-Za-z])\s+in\s*\((?P<values>[^()]*)\)\s*do\b\s*(?P<rest>.*)",
        re.I | re.S,
    )
    SET = re.compile(r"""set\s+(?:"([^="]+)=(.*)"[^"]*|([^=\s/"][^=]*)=(.*))""", re.IGNORECASE | re.DOTALL)
    WORD = re.compile(r"""(?:[^\s"^]|\^.|"[^"]*(?:"|$)|\^$)+""", re.DOTALL)
    _unset_is_empty = False

    def blocks(self, text: str) -> list[Node]:
        blocks = Blocks()
        lines = iter(enumerate(text.split("\n"), 1))
        for number, line in lines:
            line = line.lstrip(" \t@")
            if re.match(r"rem\b|:", line, re.IGNORECASE):  # comments and labels
                continue
            while (len(line) - len(line.rstrip("^"))) % 2:
                line = line[:-1] + next(lines, (0, ""))[1]
            self._line(line, number, blocks)
            blocks.end_line()
        return blocks.whole

    def _line(self, line: str, number: int, blocks: Blocks) -> None:
        _require_short(line)
        parts: list[str] = []
        operator, literal = "", 0

        def end(opens: bool = False) -> None:
            """Add what stands so far; with ``opens``, a bracket follows whose block it heads."""
            nonlocal parts, operator
            text = "".join(parts).strip().lstrip("@")
            parts = []
            while True:
                inner = self.IF.fullmatch(text) or self.FOR.fullmatch(text)
                otherwise = re.match(r"else\b\s*", text, re.IGNORECASE)
                if otherwise is not None:
                    text = text[otherwise.end() :]
                    follows = self.IF.fullmatch(text)
                    condition = [] if follows is None else [Statement(follows["condition"], "", number)]
                    text = text if follows is None else follows["rest"]
                    blocks.otherwise(condition, inline=bool(text))
                elif inner is None:
                    break
                else:
                    text = inner["rest"]
                    block: Branch | Loop
                    if inner.re is self.IF:
                        block = Branch([([Statement(inner["condition"], "", number)], [])])
                    else:
                        named = "" if inner["kind"] else f"%%{inner['name'].lower()}"
                        block = Loop(named, inner["values"].replace(",", " "), [])
                    blocks.enter(block, inline=bool(text))
                if not text:
                    return
            if text:
                blocks.nodes.append(Statement(text, operator, number))
            if opens:
                blocks.enter(Branch([([], [])]))
            operator = ""

        for found in self.TOKENS.finditer(line):
            if found["redirection"]:
                parts.append(" ")
            elif found["operator"]:
                end()
                operator = found["operator"] if len(found["operator"]) == 2 else ""
            elif found["bracket"] == "(":
                if self._heads_block(parts):
                    end(opens=True)
                else:
                    literal += 1
                    parts.append("(")
            elif found["bracket"] == ")" and literal == 0 and len(blocks.open) > len(blocks.inline):
                end()
                blocks.leave()
            else:
                literal -= found["bracket"] == ")" and literal > 0
                parts.append(found[0])
        end()

    def _heads_block(self, parts: list[str]) -> bool:
        """Return whether what stands before a bracket makes it one of a block: nothing, else, do, or a condition."""
        words = [part for part in parts[-3:] if not part.isspace()]
        if not words or words[-1].lower() in ("else", "do"):
            return True
        if len(parts) > MOST_OF_CONDITION:
            return False
        found = self.IF.fullmatch(re.sub(r"^\s*else\s+", "", "".join(parts), flags=re.IGNORECASE).strip())
        return found is not None and not found["rest"]

    def simple(self, text: str, sure: bool) -> list[str]:
        text = self._expand(text)
        if (found := self.SET.fullmatch(text)) is not None:
            name, value = (found[1], found[2]) if found[1] else (found[3], re.sub(r"\^(.)", r"\1", found[4]))
            self.set(name.strip().lower(), [value], sure)
        elif (computed := re.match(r'set\s+/[ap]\s+"?(\w+)', text, re.IGNORECASE)) is not None:
            self.variables.pop(computed[1].lower(), None)
            self._unknown[computed[1].lower()] = COMPUTED
        else:
            return self._split(text)
        return []

    def words_of(self, text: str) -> list[str]:
        return self._split(self._expand(text))

    def _split(self, text: str) -> list[str]:
        words = (re.sub(r'"([^"]*)"?|\^(.?)', r"\1\2", each) for each in self.WORD.findall(text))
        return [word.replace("%%", "%") for word in words]

    def _expand(self, text: str) -> str:
        def value(found: re.Match[str]) -> str:
            if found["here"]:  # the file's own folder
                return ".\\"
            if found["all"]:
                return ""
            if found["late"] and found["late"].lower() not in self.variables:
                return found[0]
            name = f"%%{found['of_loop']}" if found["of_loop"] else found["name"] or found["late"]
            known = self._value(name.lower(), found[0])
            return ("" if self._unset_is_empty else found[0]) if known is None else "".join(known)

        return self.VARIABLE.sub(value, text)

    def holds(self, text: str) -> bool | None:
        self._unset_is_empty = True
        text = self._expand(text).strip()
        self._unset_is_empty = False
        same = re.match(r"/i\s+", text, re.IGNORECASE)
        text = text[same.end() :].lower() if same else text
        negated = re.match(r"not\s+", text, re.IGNORECASE)
        text = text[negated.end() :] if negated else text
        defined = re.fullmatch(r"defined\s+(\S+)", text, re.IGNORECASE)
        compared = re.fullmatch(r"(.*?)\s*==\s*(.*)", text) or re.fullmatch(r"(\S+)\s+(\w{3})\s+(\S+)", text)
        found: bool | None = None
        if defined is not None:
            found = bool("".join(self.variables.get(defined[1].lower(), [])))
        elif compared is not None and len(compared.groups()) == 2:
            found = compared[1].strip() == compared[2].strip()
        elif compared is not None:
            signs = {"equ": "eq", "neq": "ne", "lss": "lt", "leq": "le", "gtr": "gt", "geq": "ge"}
            found = self._compare(compared[1].strip('"'), signs.get(compared[2].lower(), ""), compared[3].strip('"'))
        return None if found is None else found != bool(negated)


class Plain(str):
    """A number or a truth value that stands without quotes: 0 is false, where ``"0"`` is true."""


class PowerShell(Tokenised):
    """Windows PowerShell and pwsh, whose names do not distinguish case."""

    ESCAPE = "`"
    TOKENS = re.compile(
        rf"""(?P<join>`\n)|(?P<escape>`.?)|(?P<newline>\n)|(?P<space>[^\S\n]+)|(?P<remark><\#.*?(?:\#>|\Z))
        |(?P<comment>(?<![^\s;&|(){{}}])\#[^\n]*)|(?P<here>@(?P<mark>['"])[ \t]*\n)
        |(?P<single>'(?:[^']|'')*+')|(?P<double>"(?:[^"`]|`.|"")*+")|(?P<redirection>{REDIRECTION})
        |(?P<operator>&&|\|\||(?<=\S)[ \t]*&|[;|])|(?P<bracket>[@$]?\(|[@$]\{{)|(?P<group>[{{}}])
        |(?P<variable>\$(?:\w+:)?\w+)|(?P<text>[^\s'"`\#;&|(){{}}<>$@]+|.)""",
        re.VERBOSE | re.DOTALL,
    )
    VARIABLE = re.compile(r"`(?P<escaped>.)|\$(?:\{|\(\$)?(?:\w+:)?(?P<name>\w+)(?<!`)[})]?", re.DOTALL)
    HEAD = re.compile(
        r"(if|elseif|else|foreach|for|while|switch|catch|try|finally|function|begin|process|end)\b(.*)", re.I | re.S
    )
    EACH = re.compile(r"\s*\(\s*\$(\w+)\s+in\s+(.*)\)\s*", re.IGNORECASE | re.DOTALL)
    ASSIGNMENT = re.compile(r"(?:\[[\w.\[\]]+\]\s*)*\$(?:\w+:)?(\w+)\s*(\+?)=(?!=)\s*(.*)", re.DOTALL)
    ADD = re.compile(r"(?:\[void\]\s*|\$null\s*=\s*)?\$(\w+)\.Add(?:Range)?\s*\((.*)\)", re.IGNORECASE | re.DOTALL)
    PARAMETER = re.compile(r"\s*(?:\[[^\]]*\]+\s*)*\$(\w+)\s*(?:=(.*))?", re.DOTALL)

    def __init__(self, bounds: Bounds | None = None) -> None:
        super().__init__(bounds)
        self.variables["psscriptroot"] = ["."]  # the file's own folder

    def goes_on(self, parts: list[str]) -> bool:
        return "".join(parts[-2:]).rstrip().endswith((",", "+", "="))

    def blocks(self, text: str) -> list[Node]:
        blocks = Blocks()
        head: Statement | None = None
        for each in self.statements(text):
            if each.text == "{":
                self._open(head, blocks)
                head = None
                continue
            blocks.nodes.extend([] if head is None else [head])
            head = None if each.text == "}" else each
            if head is None:
                blocks.leave()
        blocks.nodes.extend([] if head is None else [head])
        return blocks.whole

    def _open(self, head: Statement | None, blocks: Blocks) -> None:
        found = None if head is None else self.HEAD.fullmatch(head.text)
        word = "" if found is None else found[1].lower()
        condition = [] if found is None or head is None else [Statement(found[2].strip(), "", head.line)]
        each = None if found is None else self.EACH.fullmatch(found[2])
        if word in ("elseif", "else"):
            blocks.otherwise(condition if word == "elseif" else [])
        elif word == "foreach" and each is not None:
            blocks.enter(Loop(each[1].lower(), each[2], []))
        elif word in ("foreach", "for", "while", "switch", "catch"):
            blocks.enter(Loop("", "", []))
        else:
            if head is not None and not word:
                blocks.nodes.append(head)
            blocks.enter(Branch([(condition if word == "if" else [], [])]))

    def simple(self, text: str, sure: bool) -> list[str]:
        if (adds := self.ADD.fullmatch(text)) is not None:
            self.set(adds[1].lower(), self._list(adds[2]), sure, True)
        elif (given := re.fullmatch(r"param\s*\((.*)\)", text, re.IGNORECASE | re.DOTALL)) is not None:
            for part in split_outside(given[1], ",", "`"):
                one = self.PARAMETER.fullmatch(part)
                if one is not None and one[2] is not None:
                    self.set(one[1].lower(), self._list(one[2]), sure)
        elif (found := self.ASSIGNMENT.fullmatch(text)) is not None:
            value = self._evaluate(found[3])
            if value is None:  # of a command, whose output is kept, or of what only PowerShell can compute
                self.variables.pop(found[1].lower(), None)
                self._unknown[found[1].lower()] = COMPUTED
                return self.words_of(found[3])
            before = self.variables.get(found[1].lower(), [])
            if found[2] and len(before) == len(value) == 1 and not re.match(r"\s*@\(", found[3]) and before[0]:
                text_of_both = [before[0] + value[0]]
                self._spend(text_of_both[0], f"${found[1]}")
                self.set(found[1].lower(), text_of_both, sure)
            else:
                self.set(found[1].lower(), value, sure, bool(found[2]))
        else:
            return self.words_of(text)
        return []

    def items(self, text: str) -> list[str]:
        return self._list(text)

    def _list(self, expression: str) -> list[str]:
        value = self._evaluate(expression)
        return [expression.strip()] if value is None else value

    def _evaluate(self, expression: str, depth: int = 0) -> list[str] | None:
        """Evaluate an expression to one text or several; None if it is none of those that are read."""
        self._read(len(expression))
        expression = re.sub(r"^\s*(?:\[[\w.\[\]]+\]\s*(?!::))*", "", expression).strip()
        if (
            not expression
            or expression.lower() == "$null"
            or re.fullmatch(r"(\[[\w.\[\]]+\])?::new\(\)|@\{\}", expression)
        ):
            return []
        parts = [part for part in split_outside(expression, ",\n;", "`") if part.strip()]
        if len(parts) > 1:
            return self._joined(parts, depth)
        sums = split_outside(expression, "+", "`")
        if len(sums) > 1 and not NUMBER.fullmatch(expression):
            values = self._joined(sums, depth)
            return None if values is None else ["".join(values)]
        opened = re.match(r"@?\(", expression)
        if opened is not None and end_of_bracket(expression, opened.end() - 1, "`") == len(expression):
            return None if depth == MAX_DEPTH else self._evaluate(expression[opened.end() : -1], depth + 1)
        if NUMBER.fullmatch(expression) or expression.lower() in ("$true", "$false"):
            return [Plain(expression.lstrip("$"))]
        if (path := re.fullmatch(r"Join-Path\s+(.*)", expression, re.IGNORECASE | re.DOTALL)) is not None:
            return ["\\".join(word for word in self.words_of(path[1]) if word not in ("-Path", "-ChildPath"))]
        words = list(self.pieces(expression))
        if len(words) == 1 and len(words[0]) == 1 and words[0][0][0] in ("single", "double", "here", "variable"):
            return self._expand(words[0])
        return None

    def _joined(self, parts: list[str], depth: int) -> list[str] | None:
        found: list[str] = []
        for part in parts:
            value = self._evaluate(part, depth + 1) if depth < MAX_DEPTH else None
            if value is None:
                return None
            found += value
        return found

    def words_of(self, text: str) -> list[str]:
        words = list(self.pieces(text))
        if words and len(words[0]) == 1 and words[0][0][1] in ("&", "."):  # it calls what follows
            words = words[1:]
        return [part for word in words for part in self._expand(word)]

    def _expand(self, word: list[tuple[str, str]]) -> list[str]:
        """Substitute variables in a word: one that is a list and stands alone becomes several words."""
        if len(word) == 2 and word[0][1] == "@" and word[1][0] == "text":  # splatted
            word = [("variable", f"${word[1][1]}")]
        if len(word) == 1 and word[0][0] == "variable":
            name = word[0][1].rpartition(":")[2].lstrip("$").lower()
            known = self._value(name, word[0][1]) if name != "args" else []
            return [word[0][1]] if known is None else known
        if len(word) == 1 and word[0][0] == "bracket" and word[0][1].startswith("("):
            value = self._evaluate(word[0][1])
            return [word[0][1]] if value is None else value
        done = []
        for kind, token in word:
            if kind == "single":
                done.append(token[1:-1].replace("''", "'"))
            elif kind == "here":
                inner = token.partition("\n")[2][:-3]
                done.append(inner if token[1] == "'" else self._substitute(inner))
            elif kind == "double":
                done.append(self._substitute(token[1:-1].replace('""', '"')))
            elif kind == "escape":
                done.append(token[1:])
            else:
                done.append(self._substitute(token) if kind in ("variable", "bracket") else token)
        return ["".join(done)]

    def _substitute(self, text: str) -> str:
        def value(found: re.Match[str]) -> str:
            if found["escaped"]:
                return {"n": "\n", "t": "\t"}.get(found["escaped"], found["escaped"])
            known = self._value(found["name"].lower(), found[0])
            return found[0] if known is None else " ".join(known)

        return self.VARIABLE.sub(value, text)

    def holds(self, text: str) -> bool | None:
        inner = text.strip()
        for _ in range(MAX_DEPTH):
            if not inner.startswith("(") or end_of_bracket(inner, 0, "`") != len(inner):
                break
            self._read(len(inner))
            inner = inner[1:-1].strip()
        for word, ends in (("-or", True), ("-and", False)):
            parts = re.split(rf"\s{word}\s", inner, flags=re.IGNORECASE)
            if len(parts) > 1 and inner.count("(") == inner.count(")") == 0:
                each = [self.holds(part) for part in parts]
                return ends if ends in each else None if None in each else not ends
        negated = re.match(r"(?:!|-not\b)\s*", inner, re.IGNORECASE)
        if negated is not None:
            found = self.holds(inner[negated.end() :])
            return None if found is None else not found
        compared = re.fullmatch(r"(.+?)\s+-[ic]?(eq|ne|gt|ge|lt|le)\s+(.+)", inner, re.IGNORECASE | re.DOTALL)
        if compared is None:
            value = self._given(inner)
            return (
                None
                if value is None
                else value[:1] not in ([], [""])
                and not (isinstance(value[0], Plain) and value[0].lower() in ("0", "0.0", "false"))
            )
        left, right, operator = self._given(compared[1]), self._given(compared[3]), compared[2].lower()
        if left is None or right is None:
            return None
        one, two = " ".join(left).lower(), " ".join(right).lower()
        if operator in ("eq", "ne") and not (NUMBER.fullmatch(one) and NUMBER.fullmatch(two)):
            return (one == two) == (operator == "eq")
        return self._compare(one, operator, two)

    def _given(self, expression: str) -> list[str] | None:
        """Evaluate an expression in a condition, where a variable without a value is empty."""
        name = re.fullmatch(r"\$(?:\w+:)?(\w+)", expression.strip())
        if name is not None and name[1].lower() not in ("true", "false", "null"):
            return None if name[1].lower() in self._unknown else self.variables.get(name[1].lower(), [])
        return self._evaluate(expression)


SHELLS: dict[str, type[Shell]] = {
    ".sh": Sh, ".bash": Sh, ".zsh": Sh, ".bat": Cmd, ".cmd": Cmd, ".ps1": PowerShell,
}  # fmt: skip
"""Shells by the suffixes of their files."""
