#!/usr/bin/env python3
"""Whether the tests that ran on PTX (ctest -L ptx) met the instructions of every kernel: what none of them met would be a
combination of formats that no test knows.

    tests/check_ptx_met.py FILE...     what each test program wrote; exit code 1 where too few were met
"""
import pathlib
import sys

ALL_AT_LEAST = 0.99
# nvcc unrolls loops of squares() and of copies to a caller by more turns than they ever take.
EACH_AT_LEAST = 0.85


def read(paths):
    """{kernel: [met by any test, ...]}"""
    kernels = {}
    for path in map(pathlib.Path, paths):
        if not path.exists():
            raise SystemExit(f"{path} is not there: run ctest -L ptx")
        for line in path.read_text().splitlines():
            name, digits = line.split(" ")
            met = [digit == "1" for digit in digits]
            before = kernels.setdefault(name, met)
            if len(before) != len(met):
                raise SystemExit(f"{path}: {name} has another number of instructions than elsewhere: run ctest -L ptx again")
            kernels[name] = [a or b for a, b in zip(before, met)]
    return kernels


def main():
    kernels = read(sys.argv[1:])
    broken = 0
    for name, met in sorted(kernels.items()):
        part = sum(met) / len(met)
        broken += part < EACH_AT_LEAST
        print(f"{100 * part:6.2f} % of {len(met):6} instructions met: {name}")
    total = sum(map(len, kernels.values()))
    part = sum(map(sum, kernels.values())) / total
    broken += part < ALL_AT_LEAST
    print(f"{100 * part:6.2f} % of {total:6} instructions met in all; at least {ALL_AT_LEAST:.0%}, and {EACH_AT_LEAST:.0%} of each kernel")
    return int(broken > 0)


if __name__ == "__main__":
    sys.exit(main())
