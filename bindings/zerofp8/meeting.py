"""How ranks find each other in the store of torch.distributed, before they have groups.

Ranks call ``initialize`` for different groups, and not equally often: no rank can tell another's
calls by counting its own. So a rank puts its record under each of its groups, by the group's
members and how often these have met; a rank that shares no group with it goes through the records
of ranks that do. Where groups differ, and ranks would look in different places for ever, numbered
copies of all that a rank has said show that it is waiting, too, and for whom.
"""

import hashlib
import json
import time
from collections import Counter
from datetime import timedelta

_met = Counter()  # groups, by their members
_seen = {}        # number of the last record that was used, by rank
_said = 0         # records of this rank

_SLICE = 0.5      # seconds until the first look for ranks with other groups


class Absent(Exception):
    """Ranks did not come in time: the argument is their list."""


def _name(members):
    return hashlib.sha1(".".join(map(str, members)).encode()).hexdigest()[:16]


def groups_of(layout):
    """The groups of a record's layout that have other ranks, by name."""
    kinds = (layout["data"], layout["pipeline"], layout["tensor"])
    return {_name(members): members for members in kinds if len(members) > 1}


def _peers(record):
    return {m for members in groups_of(record["layout"]).values() for m in members}


def meet(store, rank, record, timeout):
    """Records of all ranks that this one is connected with, by rank.

    Raises
    ------
    Absent
        Nothing of this call is left in the store then, as if it had not been made.
    """
    global _said
    record["met"] = {name: _met[name] + 1 for name in groups_of(record["layout"])}
    record["seen"] = {str(peer): _seen.get(peer, 0) for peer in _peers(record)}
    record["number"] = _said = _said + 1
    text = json.dumps(record)
    own = [_numbered(rank, _said), *(_key(g, n, rank) for g, n in record["met"].items())]
    for key in own:
        store.set(key, text)
    store.set(_last(rank), str(_said))
    try:
        records = _collect(store, {rank: record}, time.monotonic() + timeout)
    except BaseException:
        _withdraw(store, own)
        raise
    for peer, theirs in records.items():
        _seen[peer] = theirs["number"]
        # Of a group that not all members were given, too: they do not use that number again.
        for name, members in groups_of(theirs["layout"]).items():
            if rank in members:
                _met[name] = max(_met[name], theirs["met"][name])
    return records


def meet_again(store, rank, records, record, timeout):
    """As `meet`, for the same ranks and at the same place as the `meet` that gave `records`."""
    deadline, found = time.monotonic() + timeout, {}
    for name, count in records[rank]["met"].items():
        store.set(_key(name, count, rank) + "/again", json.dumps(record))
    keys = {r: _key(*next(iter(records[r]["met"].items())), r) + "/again" for r in records}
    if not wait(store, list(keys.values()), deadline):
        raise Absent([r for r, key in keys.items() if not store.check([key])])
    for r, key in keys.items():
        found[r] = json.loads(store.get(key))
    return found


def wait(store, keys, deadline):
    """Whether all keys are there in time. In slices, so that Ctrl-C ends it."""
    while True:
        left = max(0.1, deadline - time.monotonic())
        try:
            store.wait(keys, timedelta(seconds=min(left, _SLICE)))
            return True
        except RuntimeError:
            if left <= _SLICE:
                return False


def _withdraw(store, keys):
    for key in keys:
        try:
            store.delete_key(key)
        except RuntimeError:  # the process that holds the store has gone
            return


def _key(group, count, rank):
    return f"{group}/{count}/{rank}"


def _numbered(rank, number):
    return f"{rank}/{number}"


def _last(rank):
    return f"{rank}/last"


def _collect(store, records, deadline):
    patience = _SLICE
    while True:
        missing = sorted({m for r in records.values() for m in _peers(r)} - {*records})
        if not missing:
            return records
        places = {r: _places(records, r) for r in missing}
        left = deadline - time.monotonic()
        try:
            store.wait([keys[0] for keys in places.values()],
                       timedelta(seconds=max(0.1, min(patience, left))))
        except RuntimeError:
            patience = min(2 * patience, 4.0)
        found = {}
        for r, keys in places.items():
            here = (json.loads(store.get(k)) for k in keys if store.check([k]))
            found[r] = next((said for said in here if _is_new(records, r, said)), None)
            found[r] = found[r] or _of_other_groups(store, records, r)
        records.update((r, said) for r, said in found.items() if said is not None)
        if not any(found.values()):
            time.sleep(0.05)  # what is there may be old, then the wait above is none
        if left < 0:
            absent = [r for r in missing if r not in records]
            if absent:
                raise Absent(absent)


def _places(records, rank):
    """Where `rank` puts its record if it was given the groups that others say it is in."""
    return list(dict.fromkeys(_key(name, r["met"][name], rank) for r in records.values()
                              for name, members in groups_of(r["layout"]).items()
                              if rank in members))


def _is_new(records, rank, said):
    """Whether none of the ranks here has used it before."""
    return all(said["number"] > r["seen"].get(str(rank), 0) for r in records.values())


def _of_other_groups(store, records, rank):
    """What `rank` says although it was given other groups than its peers.

    That is, if it waits for one of the ranks here, which waits for it and has not seen this record
    before. The first such one, since it may have gone on with an error meanwhile.
    """
    if not store.check([_last(rank)]):
        return None
    waiting = {r: said["seen"][str(rank)] for r, said in records.items()
               if str(rank) in said["seen"]}
    for number in range(min(waiting.values()) + 1, int(store.get(_last(rank))) + 1):
        key = _numbered(rank, number)
        if not store.check([key]):  # withdrawn
            continue
        said = json.loads(store.get(key))
        if any(r in waiting and number > waiting[r] for r in _peers(said)):
            return said
    return None
