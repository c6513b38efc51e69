"""``param_groups[i]["reduce_group"]``: parameters that are averaged over a part of the data ranks.

Experts are the usual case: of four data ranks, {0, 2} hold one and {1, 3} another.
"""

import torch.distributed as dist

from .errors import ConfigError

KEYS = ("reduce_group", "reduce_divisor")


def read(param_groups, layout):
    """What the template's parameter groups say, checked as far as one rank can.

    Parameters
    ----------
    param_groups : list of dict
        ``reduce_group`` is a ProcessGroup or a list of global ranks; ``reduce_divisor``, what their
        sum is divided by, is a number above 0 (default: the ranks of the group).
    layout : groups.Layout

    Returns
    -------
    list
        Per parameter group None, or ``[global ranks, divisor]`` with 0 for the default.

    Raises
    ------
    ConfigError
        No group (for parameters that are marked as experts, too), one without this rank, one with
        ranks that are not data ranks, a bad divisor.
    """
    found = []
    for index, group in enumerate(param_groups):
        ranks, divisor = (group.get(key) for key in KEYS)
        place = f"param_groups[{index}][\"reduce_group\"]"
        if ranks is None and divisor is None:
            _refuse_marked_experts(group, place, layout)
            found.append(None)
            continue
        ranks = _ranks_of(ranks, place, layout)
        if divisor is not None and not (isinstance(divisor, (int, float)) and divisor > 0):
            raise ConfigError(f"param_groups[{index}][\"reduce_divisor\"]", repr(divisor),
                              "a number above 0", "remove it to divide by the group's ranks")
        found.append([ranks, float(divisor or 0)])
    return found


def _refuse_marked_experts(group, place, layout):
    # Megatron's and DeepSpeed's mark: averaged over all data ranks, different experts would mix.
    marked = sum(getattr(p, "allreduce", True) is False for p in group["params"])
    if marked and len(layout.data) > 1:
        raise ConfigError(place, f"None, for {marked} parameters with the mark allreduce = False",
                          "the data ranks that hold the same experts",
                          "put experts into a parameter group with their reduce_group")


def _ranks_of(group, place, layout):
    if isinstance(group, dist.ProcessGroup) and dist.is_initialized():
        ranks = list(dist.get_process_group_ranks(group))
    elif isinstance(group, (list, tuple)) and all(type(r) is int for r in group):
        ranks = sorted(set(group))
    else:
        raise ConfigError(place, type(group).__name__, "a ProcessGroup or a list of global ranks",
                          "pass the ranks that hold these parameters")
    if layout.rank not in ranks:
        raise ConfigError(place, f"ranks {ranks}", f"a group that has this rank, {layout.rank}",
                          "pass the group that this rank is in")
    if not set(ranks) <= set(layout.data):
        raise ConfigError(
            place, f"ranks {ranks}", f"a part of the data-parallel ranks, {layout.data}",
            "pass the larger group (e.g. data x context parallel) as data_parallel_group, and the "
            "smaller one as reduce_group of the other parameters")
    return ranks


def check_same(records):
    """Data ranks have to agree which groups have ranks of their own, and members on the members.

    Raises
    ------
    ConfigError
        The same on all ranks.
    """
    for rank, record in records.items():
        first = record["layout"]["data"][0]
        kinds, expected = (
            [None if group is None else group[1] for group in records[r]["reduce"]]
            for r in (rank, first))
        if kinds != expected:
            raise ConfigError(
                "param_groups", f"reduce_group and reduce_divisor {_shown(kinds)} on rank {rank}, "
                f"{_shown(expected)} on rank {first}",
                "the same parameter groups on all data ranks", "give each data rank the groups in the same order, with the same divisors")
    for rank, record in records.items():
        for index, group in enumerate(record["reduce"]):
            for member in group[0] if group else ():
                theirs = records[member]["reduce"][index]
                if theirs[0] != group[0]:
                    raise ConfigError(
                        f"param_groups[{index}][\"reduce_group\"]",
                        f"ranks {group[0]} on rank {rank}, ranks {theirs[0]} on rank {member}",
                        "the same group on all of its ranks",
                        "pass the group that has this rank and its peers on each rank")


def _shown(divisors):
    return [("none" if d is None else "by its size" if d == 0 else d) for d in divisors]


def name_of(group):
    """The engine's name: the same on all data ranks, whatever the members."""
    return f"param_groups[{group}]"


def keep_as_ranks(param_groups, found):
    """Let the dicts hold ranks instead of process groups, which can be neither copied nor saved."""
    for group, entry in zip(param_groups, found):
        if entry is not None:
            group["reduce_group"] = list(entry[0])
