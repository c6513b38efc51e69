"""Names of other packages that are relied on although they are not public."""

import importlib
import inspect


def absent_of(needed):
    """What of `needed` the installed packages lack, as a list of names.

    Parameters
    ----------
    needed : iterable of (module, attribute path, arguments that it has to take)
    """
    absent = []
    for module, path, arguments in needed:
        name = f"{module}.{path}"
        try:
            found = importlib.import_module(module)
            for part in path.split("."):
                found = getattr(found, part)
        except (ImportError, AttributeError):
            absent.append(name)
            continue
        taken = inspect.signature(found).parameters if arguments else ()
        absent += [f"argument \"{a}\" of {name}" for a in arguments if a not in taken]
    return absent
