"""Makes text safe to print: without control characters from outside, and without secrets. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

_MOST_ON_A_LINE = 1000
MASK = "***"
_SECRET_NAME = re.compile(
    r"SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL|(?:^|_)(?:JWT|[A-Z]*(?:TOKEN|KEYS?))(?:_|$)"
    r"|PRECONDITION_TRANSPORTS"  # the key of an Open MPI job
)
_IN_URL = re.compile(r"(?<=://)(?P<user>[^\s/:@]*):[^\s/]+@")
_PAIR = re.compile(r"(?<![\w.-])(?P<name>[\w.-]+)=(?P<value>[^\s,;]+)")
_MIN_LENGTH = 6
"""Shorter values are not secrets, and would match everywhere."""


def one_line(text: str, most: int = _MOST_ON_A_LINE) -> str:
    """Return ``text`` as one line without control characters, and without its middle if long."""
    return _shorten("".join(map(_escape, text)) if not text.isprintable() else text, most)


def lines(text: str, most: int = 64 * 1024) -> str:
    """Return ``text`` as :func:`one_line` does, but keep its tabs and line breaks."""
    return _shorten(printable(text), most)


def printable(text: str) -> str:
    """Return ``text`` without control characters except tabs and line breaks."""
    return "".join(char if char in "\n\t" else _escape(char) for char in text)


def first_words(text: str, most: int) -> str:
    """Return ``text``, or as many of its first words as fit, followed by ``...``."""
    if len(text) <= most:
        return text
    start = text[:most]
    end = start.rfind(" ", most // 2)
    return f"{(start[:end] if end > 0 else start).rstrip('.')}..."


def _escape(char: str) -> str:
    return char if char.isprintable() else char.encode("unicode_escape").decode()


def _shorten(text: str, most: int) -> str:
    half = most // 2
    return text if len(text) <= most else f"{text[: half - 3]} ... {text[-half + 2 :]}"


def is_secret(name: str) -> bool:
    """Return whether the name of a variable or an option suggests a secret value.

    Example:
        >>> [is_secret(name) for name in ("HF_TOKEN", "--api-key", "TOKENIZERS_PARALLELISM")]
        [True, True, False]
    """
    return _SECRET_NAME.search(re.sub(r"\W", "_", name).upper()) is not None


def holds_secret(name: str, value: str) -> bool:
    """Return whether a variable has a secret's name, or a URL with a password as its value."""
    return is_secret(name) or _IN_URL.search(value) is not None


class Mask:
    """A mask for the secrets of an environment, values with a secret's name, URLs' passwords."""

    def __init__(self, env: Mapping[str, str]) -> None:
        found = {value for name, value in env.items() if is_secret(name)}
        secrets = sorted((each for each in found if len(each) >= _MIN_LENGTH), key=len)
        longest_first = "|".join(re.escape(each) for each in reversed(secrets))
        self._secrets = re.compile(longest_first) if secrets else None

    def text(self, text: str) -> str:
        """Return the text with secrets masked: ``id=7,token=***``, ``https://ada:***@host``."""
        if self._secrets is not None:
            text = self._secrets.sub(MASK, text)
        text = _IN_URL.sub(rf"\g<user>:{MASK}@", text)
        return _PAIR.sub(
            lambda pair: f"{pair['name']}={MASK}" if is_secret(pair["name"]) else pair[0], text
        )

    def words(self, words: Iterable[str]) -> tuple[str, ...]:
        """Return the words of a command line with secrets masked, also in ``--token VALUE``."""
        shown: list[str] = []
        before = ""
        for word in words:
            is_option = before.startswith("-") and "=" not in before
            is_value = is_option and is_secret(before) and not word.startswith("-")
            name, equals, _ = word.partition("=")
            masked = f"{name}={MASK}" if equals and is_secret(name) else self.text(word)
            shown.append(MASK if is_value else masked)
            before = word
        return tuple(shown)

    def rows(self, rows: Sequence[tuple[str, str, str]]) -> tuple[tuple[str, str, str], ...]:
        """Return the (option, value, source) rows with secrets masked in the values."""
        return tuple((option, self.text(value), source) for option, value, source in rows)
