"""Text files of the user: UTF-8, with or without a byte-order mark; anything else is refused with the way out."""

from __future__ import annotations

from pathlib import Path
from typing import IO

from kvfold.errors import InputError

MAX_BYTES = 1 << 30  # of a text
_UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")


def read_text_file(path: Path) -> str:
    """The text of a file, its line ends as "\\n"."""
    try:
        with path.open("rb") as file:
            content = read_bounded(file, str(path))
    except (OSError, ValueError) as error:  # ValueError: a name with NUL in it
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"the text {path!s} cannot be read ({reason}); name a text file") from None
    return decode_text(content, str(path))


def read_bounded(file: IO[bytes], name: str) -> bytes:
    """All bytes of an open file; InputError for more than a text has, such as those of /dev/zero, which never end."""
    content = file.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise InputError(f"{name} has more than {MAX_BYTES >> 20:,} MB; split the text, or name another file")
    return content


def is_utf8(text: str) -> bool:
    """False for lone surrogates, by which Python stands in for bytes of an argument that are not UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def decode_text(content: bytes, name: str) -> str:
    """The text in `content`, which the user knows as `name`; InputError if there is none."""
    if content.startswith(_UTF16_MARKS):
        raise _wrong_encoding(name, "UTF-16")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        if b"\0" in content:
            raise _binary(name) from None
        raise _wrong_encoding(name, "WINDOWS-1252") from None
    if "\0" in text:
        raise _binary(name)
    if not text.strip():
        raise InputError(f"{name} is empty; there is nothing to read")
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _binary(name: str) -> InputError:
    return InputError(f"{name} is a binary file, not text; convert it to UTF-8 text first")


def _wrong_encoding(name: str, encoding: str) -> InputError:
    seems = "is UTF-16" if encoding == "UTF-16" else "is not UTF-8, perhaps Windows-1252 or Latin-1"
    convert = f"iconv -f {encoding} -t UTF-8"
    how = f"pipe it through {convert}" if name == "stdin" else f"convert it: {convert} {name} > utf8.txt"
    return InputError(f"{name} {seems}; {how}")
