# SPDX-License-Identifier: Apache-2.0
"""Reads a pickle of plain containers, numbers and text without executing it.

A pickle is a program, whose opcodes may import and call anything. This reader knows the opcodes that build dicts,
lists, tuples, numbers, texts and bytes; any other ends the reading. Opcodes: `pickletools` of CPython 3.14, protocols 0
to 5.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

_MOST_DIGITS = 40  # of a number: addresses and microseconds have 20
_MARK = object()
_CALLS = {
    b"c": "GLOBAL", b"\x93": "STACK_GLOBAL", b"R": "REDUCE", b"b": "BUILD", b"i": "INST", b"o": "OBJ",
    b"\x81": "NEWOBJ", b"\x92": "NEWOBJ_EX", b"P": "PERSID", b"Q": "BINPERSID", b"\x82": "EXT1", b"\x83": "EXT2",
    b"\x84": "EXT4", b"\x97": "NEXT_BUFFER", b"\x98": "READONLY_BUFFER",
}  # fmt: skip


class PickleError(ValueError):
    """The bytes are no pickle of plain containers; the text names the finding and its byte."""


class _Reader:
    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    def read(self) -> Any:
        data, stack, steps = self._data, self._stack, _STEPS
        while True:
            opcode = data[self._at : self._at + 1]
            self._at += 1
            if opcode == b".":
                return stack.pop()
            step = steps.get(opcode)
            if step is None:
                self._refuse(opcode)
            else:
                step(self)

    def _refuse(self, opcode: bytes) -> None:
        if not opcode:
            raise PickleError("it ends before its end is marked")
        at = f"at byte {self._at - 1}"
        if opcode in _CALLS:
            raise PickleError(f"it asks for an object to be imported or called ({_CALLS[opcode]} {at})")
        raise PickleError(f"no pickle has byte {opcode!r} {at}")

    def take(self, count: int) -> bytes:
        part = self._data[self._at : self._at + count]
        if len(part) != count:
            raise PickleError("it ends before its end is marked")
        self._at += count
        return part

    def line(self) -> bytes:
        end = self._data.find(b"\n", self._at)
        if end < 0:
            raise PickleError("it ends before its end is marked")
        part = self._data[self._at : end]
        self._at = end + 1
        return part

    def number(self, form: str) -> Any:
        return struct.unpack(form, self.take(struct.calcsize(form)))[0]

    def push(self, value: Any) -> None:
        self._stack.append(value)

    def pop(self) -> Any:
        value = self._stack.pop()
        if value is _MARK:
            raise IndexError
        return value

    def since_mark(self) -> list[Any]:
        stack = self._stack
        at = len(stack) - 1
        while stack[at] is not _MARK:
            at -= 1
            if at < 0:
                raise IndexError
        items = stack[at + 1 :]
        del stack[at:]
        return items

    def top(self, kind: type) -> Any:
        value = self._stack[-1]
        if type(value) is not kind:
            raise PickleError(f"it adds to a {type(value).__name__} as to a {kind.__name__}")
        return value

    def remember(self, key: int) -> None:
        self._memo[key] = self._stack[-1]

    def recall(self, key: int) -> None:
        self._stack.append(self._memo[key])

    def memoize(self) -> None:
        self.remember(len(self._memo))

    def set_items(self, items: list[Any]) -> None:
        target = self.top(dict)
        if len(items) % 2:
            raise PickleError("a key has no value")
        for key, value in zip(items[::2], items[1::2], strict=True):
            target[key] = value

    def tuple_of(self, count: int) -> None:
        items = [self.pop() for _ in range(count)]
        self.push(tuple(reversed(items)))

    def set_item(self) -> None:
        value, key = self.pop(), self.pop()
        self.set_items([key, value])

    def append(self) -> None:
        value = self.pop()
        self.top(list).append(value)

    def extend(self) -> None:
        items = self.since_mark()
        self.top(list).extend(items)

    def set_all(self) -> None:
        items = self.since_mark()
        self.set_items(items)

    def dict_of_mark(self) -> None:
        items = self.since_mark()
        self.push({})
        self.set_items(items)

    def long(self, count: int) -> None:
        if not 0 <= count <= _MOST_DIGITS:
            raise PickleError(f"a number of {count} bytes")
        self.push(int.from_bytes(self.take(count), "little", signed=True))

    def decimal(self) -> None:
        digits = self.line()
        if len(digits) > _MOST_DIGITS:
            raise PickleError(f"a number of {len(digits)} digits")
        self.push(
            {b"00": False, b"01": True}.get(digits) if digits in (b"00", b"01") else int(digits.rstrip(b"L"))
        )

    def text(self, count: int) -> None:
        self.push(str(self.take(count), "utf-8", "surrogatepass"))


_Step = Callable[[_Reader], object]
_STEPS: dict[bytes, _Step] = {
    b"\x80": lambda r: r.take(1),  # PROTO
    b"\x95": lambda r: r.take(8),  # FRAME
    b"(": lambda r: r.push(_MARK),
    b"0": lambda r: r.pop(),
    b"1": lambda r: r.since_mark(),
    b"2": lambda r: r.push(r._stack[-1]),
    b"N": lambda r: r.push(None),
    b"\x88": lambda r: r.push(True),
    b"\x89": lambda r: r.push(False),
    b"}": lambda r: r.push({}),
    b"]": lambda r: r.push([]),
    b")": lambda r: r.push(()),
    b"d": _Reader.dict_of_mark,
    b"l": lambda r: r.push(r.since_mark()),
    b"t": lambda r: r.push(tuple(r.since_mark())),
    b"\x85": lambda r: r.tuple_of(1),
    b"\x86": lambda r: r.tuple_of(2),
    b"\x87": lambda r: r.tuple_of(3),
    b"s": _Reader.set_item,
    b"u": _Reader.set_all,
    b"a": _Reader.append,
    b"e": _Reader.extend,
    b"\x94": _Reader.memoize,
    b"q": lambda r: r.remember(r.number("<B")),
    b"r": lambda r: r.remember(r.number("<I")),
    b"p": lambda r: r.remember(int(r.line()[:20])),
    b"h": lambda r: r.recall(r.number("<B")),
    b"j": lambda r: r.recall(r.number("<I")),
    b"g": lambda r: r.recall(int(r.line()[:20])),
    b"K": lambda r: r.push(r.number("<B")),
    b"M": lambda r: r.push(r.number("<H")),
    b"J": lambda r: r.push(r.number("<i")),
    b"\x8a": lambda r: r.long(r.number("<B")),
    b"\x8b": lambda r: r.long(r.number("<i")),
    b"I": _Reader.decimal,
    b"L": _Reader.decimal,
    b"G": lambda r: r.push(r.number(">d")),
    b"F": lambda r: r.push(float(r.line()[:40])),
    b"\x8c": lambda r: r.text(r.number("<B")),
    b"X": lambda r: r.text(r.number("<I")),
    b"\x8d": lambda r: r.text(r.number("<Q")),
    b"V": lambda r: r.push(str(r.line(), "raw-unicode-escape")),
    b"C": lambda r: r.push(r.take(r.number("<B"))),
    b"B": lambda r: r.push(r.take(r.number("<I"))),
    b"\x8e": lambda r: r.push(r.take(r.number("<Q"))),
}


def read(data: bytes) -> Any:
    """Return the dicts, lists, tuples, numbers, texts and bytes of a pickle; raises `PickleError` for anything else."""
    try:
        return _Reader(data).read()
    except (IndexError, KeyError):
        raise PickleError("it reads a value that it has not stored") from None
    except (TypeError, OverflowError):
        raise PickleError("a key of a dict that can be none") from None
    except PickleError:
        raise
    except ValueError as error:
        raise PickleError(f"a number or a text is damaged ({error})") from None
