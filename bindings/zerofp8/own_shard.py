"""This rank's shard as other ranks see it: counted, and given to those that ask for it.

A thread reads the engine's memory while the trainer goes on. That is safe until the next step's
update, which cannot begin without the rank that asks. What else changes state (a load, weights that
were written from outside) leaves a copy of what was there before, until the next step.
"""

import threading
import time
from contextlib import contextmanager

from .errors import Error


class OwnShard:
    """How often this rank's state has changed, and its pieces at such a count.

    Parameters
    ----------
    engine : PlacedEngine
    listener : Listener or None
        None: nobody can ask.

    Attributes
    ----------
    version : tuple of int
        Steps that were finished, loads, and writes from outside since the last step: the same on
        all ranks that have done the same.
    """

    def __init__(self, engine, listener=None):
        self.version = (0, 0, 0)
        self.is_live = engine.placement.index is None  # else a thread must not touch the engine
        self.listener = listener
        self._engine = engine
        self._pieces = None  # parameter, name, size
        self._kept = {}      # version -> {number of the piece: bytes}
        self._changed = threading.Condition()
        self._stepping = self._ended = self.is_closed = False
        if listener is not None:
            threading.Thread(target=_accept, args=(self,), daemon=True,
                             name="zerofp8 shards").start()

    # -- called by the optimizer -----------------------------------------------------------------

    def begin_step(self):
        self._stepping = True
        with self._changed:
            self._changed.notify_all()

    def end_step(self):
        with self._changed:
            self._stepping = False
            self._kept.clear()
            self._move_on((self.version[0] + 1, self.version[1], 0))

    @contextmanager
    def loading(self):
        """Around calls that write state."""
        with self._changed:
            if self.listener is not None and self.is_live:
                self._keep_all()
            self._move_on((self.version[0], self.version[1] + 1, 0))
            yield

    @contextmanager
    def following(self):
        """Around calls that let masters follow weights."""
        with self._changed:
            if self.listener is not None and self.is_live:
                self._keep([i for i, (_, name, _) in enumerate(self.pieces())
                            if name.startswith("master@")])
            self._move_on((*self.version[:2], self.version[2] + 1))
            yield

    def publish(self):
        """Copy the shard for others, where their threads cannot read it from the engine."""
        if not self.is_live:
            with self._changed:
                self._keep_all()
                self._changed.notify_all()

    def unpublish(self):
        if not self.is_live:
            with self._changed:
                self._kept.clear()

    def retire(self):
        """The optimizer has gone: keep a copy and let the engine go."""
        with self._changed:
            if self.is_live and not self.is_closed:
                self._keep_all()
            self._engine, self.is_live, self._ended = None, False, True
            self._changed.notify_all()

    def end(self):
        """The process comes to its end and does nothing more."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def close(self):
        with self._changed:
            self.is_closed, self._engine = True, None
            self._kept.clear()
            self._changed.notify_all()
        if self.listener is not None:
            self.listener.close()

    def pieces(self):
        """``(parameter, name, size)`` of this rank's pieces, the same for the engine's life."""
        if self._pieces is None:
            self._pieces = [(p, name, size) for p, name, _, size in self._engine.state_pieces()]
        return self._pieces

    def _move_on(self, version):
        self.version = version
        self._changed.notify_all()

    def _keep(self, numbers):
        kept = self._kept.setdefault(self.version, {})
        absent = [n for n in numbers if n not in kept]
        kept.update(zip(absent, self._engine.unordered.read_pieces(absent)))

    def _keep_all(self):
        everything = range(len(self.pieces()))
        self._keep(everything)
        for kept in self._kept.values():  # what they did not keep has not changed until now
            for number in everything:
                kept.setdefault(number, self._kept[self.version][number])

    # -- called by threads -----------------------------------------------------------------------

    def answer(self, request, rank):
        """Pieces of the wanted parameters at a version: ``(header, buffers)``.

        Waits for a step that is not over yet. A header with "error" says why there are none.
        """
        asked, wanted = tuple(request["version"]), set(request["parameters"])
        with self._changed:
            self._changed.wait_for(lambda: self._is_settled(asked), request["patience"])
            kept = self._kept.get(asked, {})
            if self.is_closed:
                return {"error": f"rank {rank} has closed its optimizer"}, []
            numbers = [i for i, (p, _, _) in enumerate(self.pieces()) if p in wanted]
            live = [n for n in numbers if n not in kept]
            # What was not kept of an earlier version has not changed since.
            if live and (not self.is_live or asked not in (self.version, *self._kept)):
                return {"error": self._why_not(asked, rank)}, []
            read = dict(zip(live, self._engine.unordered.read_pieces(live))) if live else {}
        header = {"pieces": [self.pieces()[n] for n in numbers]}
        return header, [kept.get(n) if n in kept else read[n] for n in numbers]

    def _is_settled(self, asked):
        here = asked in self._kept or (self.version == asked and self.is_live)
        return here or self.is_closed or self.version > asked or self._ended

    def _why_not(self, asked, rank):
        steps, loads, writes = self.version
        text = (f"rank {rank} is after {steps} steps, {loads} loads and {writes} writes to its "
                f"weights; asked was the state after {asked[0]}, {asked[1]} and {asked[2]}")
        return text + ("; it has ended" if self._ended else "")

    def wait_until_done(self, version, patience):
        """Until this rank will not ask another one for state of `version` any more."""
        with self._changed:
            self._changed.wait_for(lambda: self.is_closed or self._ended or self._stepping
                                   or self.version[:2] > tuple(version[:2]), patience)


def _accept(shard):
    while (connection := shard.listener.accept()) is not None:
        threading.Thread(target=_serve, args=(shard, connection), daemon=True,
                         name="zerofp8 shards").start()


def _serve(shard, connection):
    try:
        if not shard.listener.admits(connection):
            return
        connection.set_timeout(None)
        request, _ = connection.receive()
        if request["ask"] == "pieces":
            connection.send(*shard.answer(request, request["of"]))
        else:
            shard.wait_until_done(request["version"], request["patience"])
            connection.send({})
    except Error as error:  # the engine was closed meanwhile
        _try_to_say(connection, str(error))
    except (OSError, EOFError, ValueError, KeyError):
        pass  # who asked has gone, or is somebody else
    finally:
        connection.close()


def _try_to_say(connection, error):
    try:
        connection.send({"error": error})
    except OSError:
        pass


def wait(threads, seconds):
    """Join them, together for at most so long."""
    deadline = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0, deadline - time.monotonic()))
