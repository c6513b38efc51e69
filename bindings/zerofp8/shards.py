"""The state of all ranks on one: asking the other ranks for their shards, and staying for theirs.

``state_dict()`` may be called on one rank alone: a trainer saves on rank 0. The other ranks give
their shards by `OwnShard`. A rank whose program has come to its end stays until the others have
ended, too, or gone on: one may still be about to save.
"""

import atexit
import os
import sys
import threading
import weakref

from .errors import ArgumentError, CommError, UnsupportedError
from .own_shard import OwnShard, wait
from .shard_wire import Connection
from .whole_state import WholeState

_FIX = "call optimizer.consolidate_state_dict() on all ranks before, or optimizer.save(folder)"


class Shards:
    """Where the state of an optimizer's parameters is.

    Parameters
    ----------
    optimizer : zerofp8.Optimizer
    owners : list of list of int
        Per parameter the global ranks that may hold a part of its state.
    rank : int
        This one.
    addresses : dict of int to list
        Of the data ranks' listeners.
    listener : Listener or None
    timeout : float
        Seconds to wait for a rank.
    """

    def __init__(self, optimizer, owners, rank, addresses, listener, timeout):
        self._optimizer = weakref.ref(optimizer)
        self._engine = optimizer._engine
        self._owners, self._rank, self._addresses = owners, rank, addresses
        self._timeout = timeout
        self._consolidated = None
        self.own = OwnShard(self._engine, listener)
        if listener is not None:
            others = {r: a for r, a in addresses.items() if r != rank}
            self._leave = _Leave(self.own, others, timeout)
            self._retire = weakref.finalize(optimizer, self._leave.because_collected)
            self._retire.atexit = False
            if self.own.is_live and optimizer.settings.accumulation_sharded:
                _LookFirst(self._optimizer, self._engine)

    # -- what happens to the state ---------------------------------------------------------------

    def begin_step(self):
        self.own.begin_step()

    def end_step(self):
        self._consolidated = None
        self.own.end_step()

    def loading(self):
        self._consolidated = None
        return self.own.loading()

    def has_loaded(self):
        with self.loading():
            pass

    def following(self):
        self._consolidated = None
        return self.own.following()

    def close(self):
        if self.own.listener is not None:
            self._retire.detach()
            self._leave.forget()
        self.own.close()

    # -- the whole -------------------------------------------------------------------------------

    def is_fresh(self):
        """Whether state is what it was at the start: zeros, and masters that are the weights."""
        if self.own.version[:2] != (0, 0):
            return False
        counters = self._engine.counters()
        return counters["applied"] == 0 and counters["skipped"] == 0

    def whole(self, places):
        """All of the state, as `WholeState`.

        Parameters
        ----------
        places : list of Places
            Of the parameters, in the engine's order.
        """
        if self._consolidated is not None:
            counters, whole = self._consolidated
            if counters == self._engine.counters():  # captured steps are not counted here
                return whole
        whole = self._of_this_rank(places)
        if whole.missing() and not self.own.is_live:
            raise UnsupportedError(
                "state_dict", f"a call on rank {self._rank}, where a part of the state is on the "
                "devices of other ranks", "a call after consolidate_state_dict()", _FIX)
        return self._with_the_others(whole)

    def consolidate(self, places, to):
        """The whole on data rank `to`, until the next step. Collective."""
        ranks = self._optimizer().settings.data_ranks
        if not 0 <= to < ranks:
            raise ArgumentError(f"consolidate_state_dict: given to={to}; allowed: a data rank, 0 to "
                                f"{ranks - 1}")
        self.own.publish()
        error = ""
        try:
            if self._engine.data_rank() == to and not self.is_fresh():
                whole = self._with_the_others(self._of_this_rank(places))
                self._consolidated = self._engine.counters(), whole
        except CommError as e:
            error = str(e)
        self._optimizer()._on_all_ranks(error)
        self.own.unpublish()

    def _of_this_rank(self, places):
        whole = WholeState(places)
        for (parameter, name, _), data in zip(self.own.pieces(), self._engine.read_pieces()):
            whole.add(parameter, name, data)
        return whole

    def _with_the_others(self, whole):
        for rank in sorted(self._addresses):
            wanted = [i for i in whole.missing() if rank in self._owners[i]]
            if wanted and rank != self._rank:
                self._ask(rank, wanted, whole)
        if whole.missing():
            names = [self._optimizer()._parameters[i].name for i in whole.missing()]
            raise CommError(f"state_dict: no rank has given all of the state of parameter "
                            f"\"{names[0]}\"; {_FIX}")
        return whole

    def _ask(self, rank, wanted, whole):
        try:
            connection = Connection.to(self._addresses[rank])
        except (OSError, EOFError) as error:
            raise CommError(
                f"state_dict: rank {rank}, which holds a part of the state, cannot be reached "
                f"({error}): it has ended or closed its optimizer; {_FIX}", [rank]) from None

        def place(header, i, size):
            parameter, name, _ = header["pieces"][i]
            if not whole.wants(parameter, name):
                return bytearray(size)
            return whole.target(parameter, name, size).numpy()

        try:
            connection.set_timeout(self._timeout + 10)
            connection.send({"ask": "pieces", "of": rank, "version": self.own.version,
                             "parameters": wanted, "patience": self._timeout})
            header, _ = connection.receive(place)
        except (OSError, EOFError) as error:
            raise CommError(f"state_dict: rank {rank} has not given its part of the state "
                            f"({error or type(error).__name__}); {_FIX}", [rank]) from None
        finally:
            connection.close()
        if "error" in header:
            raise CommError(f"state_dict on rank {self._rank}: {header['error']}; {_FIX}", [rank])


class _LookFirst:
    """Looks for weights that were written before a micro-batch's first gradient is taken.

    With a sharded accumulator a rank waits for the others from there on, and not only at the step;
    one of these may ask for the state that follows such writes.
    """

    def __init__(self, optimizer, engine):
        self._optimizer, self._has_looked = optimizer, False
        self._add, self._end = engine.add_gradient, engine.end_micro_batch
        engine.add_gradient, engine.end_micro_batch = self.add_gradient, self.end_micro_batch

    def add_gradient(self, *arguments):
        self._look()
        self._add(*arguments)

    def end_micro_batch(self):
        self._look()
        self._has_looked = False
        self._end()

    def _look(self):
        optimizer = self._optimizer()
        if not self._has_looked and optimizer is not None and not optimizer._watch.replaced():
            self._has_looked = True
            optimizer._watch.look()


class _Leave:
    """Stays for the other ranks when an optimizer or the process comes to its end."""

    all = set()

    def __init__(self, own, others, timeout):
        self._own, self._others, self._timeout = own, others, timeout
        self.pid = os.getpid()
        self._threads = []
        _Leave.all.add(self)

    def forget(self):
        _Leave.all.discard(self)

    def because_collected(self):
        """Keeps a copy of the shard, in place of the engine, while somebody may ask for it."""
        if os.getpid() != self.pid:
            return
        self._own.retire()
        self._start()

    def begin(self):
        if not self._threads:
            self._own.end()
            self._start()

    def wait(self):
        wait(self._threads, self._timeout)

    def _start(self):
        self._threads = [threading.Thread(target=self._stay_for, args=(address,), daemon=True)
                         for address in self._others.values()]
        for thread in self._threads:
            thread.start()
        threading.Thread(target=self._close_after_all, daemon=True).start()

    def _close_after_all(self):
        self.wait()
        self.forget()
        self._own.close()

    def _stay_for(self, address):
        """Until that rank needs nothing more, or is not there any more."""
        try:
            connection = Connection.to(address)
            connection.set_timeout(self._timeout)
            connection.send({"ask": "farewell", "version": self._own.version,
                             "patience": self._timeout})
            connection.receive()
        except (OSError, EOFError):
            pass


def stay_for_others():
    """At the end of a program that has not failed, while another rank may ask for state."""
    if getattr(sys, "last_value", None) is not None:  # the process ends by an exception
        return
    leaving = [one for one in _Leave.all if one.pid == os.getpid()]
    for one in leaving:
        one.begin()
    for one in leaving:
        one.wait()


atexit.register(stay_for_others)
