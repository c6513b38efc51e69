#!/usr/bin/env python3
"""Checks one object of the kernels: vectorised, and exporting nothing but its table.

    check_isa_object.py OBJECT NAME REGISTER MINIMUM

REGISTER (ymm, zmm) must appear in at least MINIMUM packed fused multiply-adds: if the loops fall back
to scalar code the kernels are some six times slower and no other test notices. A function that two
objects both define could be linked from the one that this CPU cannot run.
"""
import re
import subprocess
import sys


def packed_fmas(path, register):
    text = subprocess.run(["objdump", "-d", "--no-show-raw-insn", path],
                          check=True, capture_output=True, text=True).stdout
    return len(re.findall(rf"\bvfn?m(?:add|sub)\w*ps\b.*%{register}", text))


def exported(path):
    text = subprocess.run(["nm", "-g", "-C", "--defined-only", path],
                          check=True, capture_output=True, text=True).stdout
    return [line.split(maxsplit=2)[1:] for line in text.splitlines()]


def main():
    path, name, register, minimum = sys.argv[1:]
    faults = []
    found = packed_fmas(path, register) if register != "none" else 0
    if found < int(minimum):
        faults.append(f"{found} packed FMAs on {register}, expected at least {minimum}")
    # The format descriptors are constant data, the same in every object.
    allowed = {f"zerofp8::cpu::kOps_{name}", "zerofp8::kFormats"}
    for kind, symbol in exported(path):
        if symbol not in allowed or kind in "TWwi":
            faults.append(f"exports {symbol} ({kind})")
    if f"zerofp8::cpu::kOps_{name}" not in {symbol for _, symbol in exported(path)}:
        faults.append("does not export its table")
    for fault in faults:
        print(f"{path}: {fault}")
    print(f"{name}: {found} packed FMAs on {register}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
