"""The caller's end of a connection to a rank, which no rank can make it wait at."""

from __future__ import annotations

import os
import socket
import struct
import sys

from tutorec._text import bytes_text

_SHORT = struct.Struct("!i")
_LONG = struct.Struct("!Q")
_READ_BYTES = 2**16
_JOINED_BYTES = 2**14


class Channel:
    """Messages that are sent and received part by part, so that every wait can have an end.

    The rank at the other end holds a connection of ``multiprocess``, whose format this is: the
    number of bytes as an int32, or -1 and the number as a uint64; then the bytes.

    Args:
        sock: Connected to the rank.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._unsent: list[memoryview] = []
        self._sending = 0  # bytes of the message
        self._came = bytearray()  # not yet a message whose length is known
        self._message: memoryview | None = None
        self._filled = 0

    def fileno(self) -> int:
        """The descriptor to wait for."""
        return self._socket.fileno()

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()

    def begin(self, message: bytes) -> bool:
        """Begin to send a message after an earlier one; returns whether all of it has been sent."""
        size = len(message)
        header = _SHORT.pack(size) if size < 2**31 else _SHORT.pack(-1) + _LONG.pack(size)
        self._sending = size
        if size <= _JOINED_BYTES:
            self._unsent.append(memoryview(header + message))
        else:
            self._unsent += memoryview(header), memoryview(message)

        return self.send()

    def send(self) -> bool:
        """Send what fits now; returns whether all has been sent.

        Raises:
            ConnectionError: The rank has gone.
        """
        try:
            while self._unsent:
                sent = self._socket.send(self._unsent[0])
                if sent < len(self._unsent[0]):
                    self._unsent[0] = self._unsent[0][sent:]
                    return False
                del self._unsent[0]
        except BlockingIOError:
            return False

        return True

    def receive(self) -> bytes | memoryview | None:
        """The next message, or None where more of it must come first; reads once at most.

        Raises:
            ConnectionError: The rank has gone.
        """
        message = self._complete()
        if message is not None:
            return message

        try:
            if self._message is None:
                data = self._socket.recv(_READ_BYTES)
                count = len(data)
                self._came += data
            else:
                count = self._socket.recv_into(self._message[self._filled :])
                self._filled += count
        except BlockingIOError:
            return None

        if not count:
            raise ConnectionError("the rank has closed its connection")
        return self._complete()

    def _complete(self) -> bytes | memoryview | None:
        if self._message is None and not self._take_length():
            return None

        assert self._message is not None, "its length is known"
        if self._filled < len(self._message):
            return None
        message = self._message
        self._message = None
        return message

    def _take_length(self) -> bool:
        """Look for a length in what has come, and make room for its message."""
        if len(self._came) < _SHORT.size:
            return False

        (size,) = _SHORT.unpack_from(self._came)
        start = _SHORT.size
        if size == -1:
            if len(self._came) < start + _LONG.size:
                return False
            (size,) = _LONG.unpack_from(self._came, start)
            start = start + _LONG.size

        if size < 0:
            raise ConnectionError("something else than a rank's messages has come")
        self._message = memoryview(bytearray(size))
        data = self._came[start : start + size]
        self._filled = len(data)
        self._message[: self._filled] = data
        del self._came[: start + self._filled]
        return True

    @property
    def sending(self) -> bool:
        """Whether a part of a message is still to be sent."""
        return bool(self._unsent)

    @property
    def transfer(self) -> str:
        """Text of the progress of the message in flight; empty without one."""
        if self._unsent:
            left = sum(map(len, self._unsent))
            return f"it had taken {_progress(self._sending - left, self._sending)} of the arguments"
        if self._message is not None:
            return f"{_progress(self._filled, len(self._message))} of its value had come"
        return ""


def _progress(received: int, total: int) -> str:
    return f"{bytes_text(max(0, received))} of {bytes_text(total)}"


def listener(folder: str) -> socket.socket:
    """A listening socket in ``folder`` if the system has such, else on a free local port."""
    path = os.path.join(folder, "socket")
    if hasattr(socket, "AF_UNIX") and sys.platform != "win32" and len(os.fsencode(path)) < 100:
        sock = socket.socket(socket.AF_UNIX)
        address = path
    else:
        sock = socket.socket(socket.AF_INET)
        address = ("127.0.0.1", 0)

    sock.bind(address)
    sock.listen(4096)  # The system lowers it to what it has.
    return sock
