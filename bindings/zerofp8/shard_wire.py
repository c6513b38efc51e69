"""Messages between the ranks' threads: a JSON header and buffers over a TCP connection.

No pickles: what comes over the network is never executed. Who connects has to know the key that
``initialize`` has told the ranks.
"""

import hashlib
import hmac
import json
import os
import socket
import struct
import weakref

_LENGTH = struct.Struct("<q")
_LONGEST_HEADER = 1 << 28
_PATIENCE = 20.0  # seconds for a connection to be made and to say who it is

_listeners = weakref.WeakSet()


def _close_in_child():
    # A forked process has no threads of its parent's, and would keep the port open.
    for listener in list(_listeners):
        listener.close()


os.register_at_fork(after_in_child=_close_in_child)


class Listener:
    """A port for other ranks, on the address that they see.

    Attributes
    ----------
    address : list
        JSON-able host, port and key, for `Connection.to`.
    """

    def __init__(self):
        self._key = os.urandom(16).hex()
        host = _own_host()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.socket(family)
        self._socket.bind((host, 0))
        self._socket.listen(128)
        self.address = [host, self._socket.getsockname()[1], self._key]
        _listeners.add(self)

    def accept(self):
        """The next connection, or None when the listener was closed."""
        try:
            return Connection(self._socket.accept()[0])
        except OSError:
            return None

    def admits(self, connection):
        """Whether who has connected knows the key."""
        nonce = os.urandom(16).hex()
        connection.set_timeout(_PATIENCE)
        connection.send({"nonce": nonce})
        answer, _ = connection.receive()
        return hmac.compare_digest(str(answer.get("mac")), _mac(self._key, nonce))

    def close(self):
        """Wakes `accept`, in the process that made the listener."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        self._socket.close()


class Connection:
    """One end of it. Errors are OSError or EOFError."""

    def __init__(self, made):
        self._socket = made
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    @classmethod
    def to(cls, address):
        host, port, key = address
        connection = cls(socket.create_connection((host, port), timeout=_PATIENCE))
        hello, _ = connection.receive()
        connection.send({"mac": _mac(key, str(hello.get("nonce")))})
        return connection

    def set_timeout(self, seconds):
        self._socket.settimeout(seconds)

    def send(self, header, buffers=()):
        text = json.dumps({**header, "sizes": [len(b) for b in buffers]}).encode()
        self._socket.sendall(_LENGTH.pack(len(text)) + text)
        for buffer in buffers:
            self._socket.sendall(buffer)

    def receive(self, place=None):
        """Header and buffers.

        Parameters
        ----------
        place : callable, optional
            Gives the memory for buffer i of the header: ``place(header, i, size)``.
        """
        header = bytearray(_LENGTH.size)
        self._fill(memoryview(header))
        length = _LENGTH.unpack(header)[0]
        if not 0 <= length <= _LONGEST_HEADER:
            raise EOFError("a message of another program")
        text = bytearray(length)
        self._fill(memoryview(text))
        header = json.loads(text.decode("utf-8"))
        buffers = []
        for i, size in enumerate(header.pop("sizes")):
            memory = bytearray(size) if place is None else place(header, i, size)
            self._fill(memoryview(memory))
            buffers.append(memory)
        return header, buffers

    def _fill(self, view):
        while len(view):
            count = self._socket.recv_into(view)
            if count == 0:
                raise EOFError("the other end has closed the connection")
            view = view[count:]

    def has_ended(self, seconds):
        """Whether the other end closes the connection within `seconds`; it sends nothing then."""
        self._socket.settimeout(seconds)
        try:
            return self._socket.recv(1) == b""
        except TimeoutError:
            return False
        except OSError:
            return True

    def close(self):
        self._socket.close()


def _mac(key, nonce):
    return hmac.new(key.encode(), nonce.encode(), hashlib.sha256).hexdigest()


def _own_host():
    """This host's address as the other ranks see it: the one that it reaches rank 0's with."""
    master = os.environ.get("MASTER_ADDR")
    if not master:
        return "127.0.0.1"
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(master, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(place)  # sends nothing
            return probe.getsockname()[0]
    except OSError:
        return "127.0.0.1"
