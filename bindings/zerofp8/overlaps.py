"""Parameters that share memory, which would lose updates to each other."""

import torch

from .errors import ConfigError


def check(parameters):
    """Refuse parameters of which two, or two elements of one, lie in the same memory.

    Adjacent and interleaved ones, as columns of a matrix, are fine.

    Parameters
    ----------
    parameters : list of NamedParameter

    Raises
    ------
    ConfigError
        Names both.
    """
    placed = [n for n in parameters if n.parameter.numel() and n.parameter.data_ptr()]
    for named in placed:
        if _repeats(named.parameter):
            _refuse(f"parameter \"{named.name}\", of which several elements share memory "
                    f"(strides {named.parameter.stride()})")
    placed.sort(key=lambda n: (str(n.parameter.device), n.parameter.data_ptr()))
    open_ = []  # those whose extent may reach beyond the begin of what follows
    for named in placed:
        p = named.parameter
        open_ = [o for o in open_ if o.parameter.device == p.device
                 and _end(o.parameter) > p.data_ptr()]
        for other in open_:
            if _share(other.parameter, p):
                _refuse(f"parameters \"{other.name}\" and \"{named.name}\", which overlap in "
                        "memory")
        open_.append(named)


def _refuse(given):
    raise ConfigError("model", given + ": updates would be lost", "memory of its own for each "
                      "element", "clone what is shared, or use one Parameter object in both places")


def _end(p):
    """The address behind the last element."""
    last = sum((size - 1) * stride for size, stride in zip(p.shape, p.stride()))
    return p.data_ptr() + (last + 1) * p.element_size()


def _repeats(p):
    reach = 0  # of the dimensions with smaller strides
    for stride, size in sorted((st, n) for n, st in zip(p.shape, p.stride()) if n > 1):
        if stride <= reach:  # perhaps; a look at all of them tells
            where = _addresses(p, p.data_ptr(), p.element_size())
            return where.unique().numel() < where.numel()
        reach += (size - 1) * stride
    return False


def _share(a, b):
    if a.is_contiguous() and b.is_contiguous():
        return True  # their extents meet, and have no holes
    unit = min(a.element_size(), b.element_size())
    begin = min(a.data_ptr(), b.data_ptr())
    if (a.data_ptr() - b.data_ptr()) % unit:
        unit = 1
    taken = torch.zeros((max(_end(a), _end(b)) - begin) // unit, dtype=torch.bool)
    taken[_addresses(a, begin, unit)] = True
    return bool(taken[_addresses(b, begin, unit)].any())


def _addresses(p, begin, unit):
    """Of all elements behind ``begin``, in units; several for an element that is larger."""
    per_element = p.element_size() // unit
    where = torch.arange(per_element) + (p.data_ptr() - begin) // unit
    for size, stride in zip(p.shape, p.stride()):
        where = (where[:, None] + torch.arange(size) * stride * per_element).flatten()
    return where
