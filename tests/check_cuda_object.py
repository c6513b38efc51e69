#!/usr/bin/env python3
"""Reads the CUDA objects: every architecture is there, no kernel spills, and of the kernels that run over elements only
the norm computes in double precision. Those of a step's few scalars (cuda_step.cu) may.

    tests/check_cuda_object.py OPS_OBJECT STEP_OBJECT CUOBJDUMP sm_80 sm_90 sm_100   exit code 1 and a line per broken rule
"""
import re
import subprocess
import sys

NORM = "squares"  # the one kernel that may use double precision
# DADD, DFMA, DMUL, DMNMX, DSETP, MUFU.RCP64H, and conversions from and to F64.
DOUBLE = re.compile(r"\b(D(ADD|FMA|MUL|MNMX|SETP|MMA)\b|\S*64H\b|[FI]2[FI]\S*\.F64\S*)")
FEWEST_KERNELS = {"ops": 10, "step": 3}


def dump(cuobjdump, *arguments):
    return subprocess.run([cuobjdump, *arguments], text=True, capture_output=True, check=True).stdout


def resources(text):
    """(architecture, kernel, {"REG": 32, "STACK": 0, ...}) of each kernel."""
    architecture = kernel = None
    for line in text.splitlines():
        if found := re.match(r"arch = (sm_\d+)", line):
            architecture = found.group(1)
        elif found := re.match(r"\s*Function (\S+):", line):
            kernel = found.group(1)
        elif kernel and "REG:" in line:
            yield architecture, kernel, {k: int(v) for k, v in re.findall(r"(\w+):(\d+)", line)}
            kernel = None


def double_precision(text):
    """(architecture, kernel, instruction) of each instruction in double precision."""
    architecture = kernel = None
    for line in text.splitlines():
        if found := re.match(r"\s*code for (sm_\d+)", line):
            architecture = found.group(1)
        elif found := re.match(r"\s*Function : (\S+)", line):
            kernel = found.group(1)
        elif found := DOUBLE.search(re.sub(r"/\*.*?\*/", "", line)):
            yield architecture, kernel, found.group(0)


def check_resources(part, rows, architectures):
    for a in architectures:
        kernels = [row for row in rows if row[0] == a]
        if len(kernels) < FEWEST_KERNELS[part]:
            yield f"{a}: {len(kernels)} kernels in {part}, expected at least {FEWEST_KERNELS[part]}"
    for a, kernel, use in rows:
        if use.get("STACK", 0) or use.get("LOCAL", 0):
            yield f"{a}: {kernel} spills: {use}"


def check_precision(instructions, architectures):
    norm = {a for a, kernel, _ in instructions if NORM in kernel}
    for a in architectures:
        if a not in norm:
            yield f"{a}: no double precision found in the norm: this check has gone blind"
    for a, kernel, instruction in sorted(set(instructions)):
        if NORM not in kernel:
            yield f"{a}: {kernel} uses double precision: {instruction}"


def main():
    ops, step, cuobjdump, *architectures = sys.argv[1:]
    broken = list(check_precision(list(double_precision(dump(cuobjdump, "--dump-sass", ops))), architectures))
    for part, obj in (("ops", ops), ("step", step)):
        rows = list(resources(dump(cuobjdump, "--dump-resource-usage", obj)))
        broken += check_resources(part, rows, architectures)
        for a in architectures:
            registers = [use["REG"] for found, _, use in rows if found == a]
            print(f"{a}: {part}: {len(registers)} kernels, {min(registers, default=0)} to {max(registers, default=0)} registers")
    print("\n".join(broken))
    return bool(broken)


if __name__ == "__main__":
    sys.exit(main())
