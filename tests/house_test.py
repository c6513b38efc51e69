#!/usr/bin/env python3
"""Rules of the house, read from the sources: layering, foreign headers, file lengths, no orphaned tests, links in docs.

    tests/house_test.py            exit code 1 and a line per broken rule
"""
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
INCLUDE = re.compile(r'^\s*#\s*include\s+([<"])([^>"]+)[>"]', re.MULTILINE)

# Public headers by layer; a layer includes its own and lower ones, never a sibling's.
L0 = {"error", "dtype", "element", "buffer", "random"}
HEADER_LAYER = {**{h: "base" for h in L0}, "ops": "kernels", "device": "kernels", "device_step": "kernels", "config": "config", "plan": "config", "partition": "partition",
                "communicator": "comm", "launch": "comm", "engine": "optim", "zerofp8": "all"}
MAY_SEE = {
    "base": {"base"},
    "kernels": {"base", "kernels"},
    "config": {"base", "config"},
    "partition": {"base", "partition"},
    "comm": {"base", "kernels", "comm"},
    "optim": {"base", "kernels", "config", "partition", "comm", "optim"},
    "all": {"base", "kernels", "config", "partition", "comm", "optim", "all"},
}
# Foreign headers and the only files that may include them.
FOREIGN = {
    "nlohmann/": {"src/config/parse.cc", "src/optim/checkpoint.cc", "src/optim/safetensors.cc"},
    "mpi.h": {"src/comm/mpi_transport.cc"},
    "xxhash.h": {"src/optim/file_io.cc"},
    "CLI/": {"tools/"},
    "torch/": {"bindings/"},
    "cuda": {"kernels/", "src/comm/nccl_api.h"},
    "nccl.h": {"src/comm/nccl_api.h"},
}
MAX_LINES = 400
LONGER = set()  # files over MAX_LINES, each with a reason in this comment: none


def tracked():
    listing = subprocess.run(["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, text=True,
                             capture_output=True)
    if listing.returncode == 0:
        names = listing.stdout.split()
    else:  # not a checkout: an unpacked archive
        names = [str(p.relative_to(ROOT)) for p in ROOT.rglob("*") if p.is_file() and "build" not in p.parts]
    return [n for n in names if (ROOT / n).exists()]


def layer_of(name):
    parts = pathlib.PurePosixPath(name).parts
    if parts[0] == "include":
        return HEADER_LAYER.get(pathlib.PurePosixPath(name).stem)
    if parts[0] == "kernels":
        return "kernels"
    if parts[0] == "src":
        return parts[1]
    return None


def layer_of_include(path):
    if path.startswith("zerofp8/"):
        return HEADER_LAYER.get(pathlib.PurePosixPath(path).stem, "unknown header")
    return layer_of(path)


def check_includes(names):
    for name in names:
        if not name.endswith((".h", ".cc", ".cu", ".cuh")):
            continue
        layer = layer_of(name)
        if layer is None:
            continue
        for kind, path in INCLUDE.findall((ROOT / name).read_text()):
            target = layer_of_include(path) if kind == '"' else None
            if target is not None and target not in MAY_SEE[layer]:
                yield f"{name}: layer {layer} includes {path} of layer {target}"
            for foreign, allowed in FOREIGN.items():
                if path.startswith(foreign) and not any(name.startswith(a) for a in allowed):
                    yield f"{name}: only {', '.join(sorted(allowed))} may include {path}"
            if name.startswith("include/") and kind == "<" and "/" in path:
                yield f"{name}: a public header includes {path}"


def check_lengths(names):
    for name in names:
        if name.endswith((".h", ".cc", ".cu", ".py", ".sh", ".cmake")) and name not in LONGER:
            lines = len((ROOT / name).read_text().splitlines())
            if lines > MAX_LINES:
                yield f"{name}: {lines} lines, at most {MAX_LINES}"


def check_orphans(names):
    lists = "\n".join((ROOT / n).read_text() for n in names if n.startswith("tests/") and n.endswith((".cmake", "CMakeLists.txt")))
    for name in names:
        path = pathlib.PurePosixPath(name)
        if len(path.parts) == 2 and path.parts[0] == "tests" and path.stem.endswith("_test"):
            if not re.search(rf"\b{re.escape(path.stem)}\b", lists):
                yield f"{name}: no CMake file of tests/ registers it"
    libraries = "\n".join((ROOT / n).read_text() for n in names if n.endswith("CMakeLists.txt"))
    for name in names:
        path = pathlib.PurePosixPath(name)
        if path.suffix in (".cc", ".cu") and path.parts[0] in ("src", "kernels", "tools", "examples"):
            if not re.search(rf"\b{re.escape(path.name)}\b", libraries):
                yield f"{name}: no CMakeLists.txt builds it"


def check_links(names):
    for name in names:
        if not name.endswith(".md"):
            continue
        for target in re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", (ROOT / name).read_text()):
            if not (ROOT / name).parent.joinpath(target).exists():
                yield f"{name}: links to {target}, which does not exist"


def check_claims():
    """What docs/claims.md names exists: C++ tests, Python tests, scripts."""
    for name in re.findall(r"`([\w./]+_test|test_\w+\.py|[\w/]+\.(?:py|sh))`", (ROOT / "docs/claims.md").read_text()):
        if not any((ROOT / place).exists() for place in (f"tests/{name}.cc", f"tests/{name}", f"tests/python/{name}", f"tests/python/clients/{name}", name)):
            yield f"docs/claims.md: names {name}, which does not exist"


def check_versions():
    """One version: CMake's, the header's, the changelog's newest."""
    cmake = re.search(r"project\(zerofp8 VERSION ([\d.]+)", (ROOT / "CMakeLists.txt").read_text()).group(1)
    header = re.search(r'return "([\d.]+)"', (ROOT / "include/zerofp8/zerofp8.h").read_text()).group(1)
    newest = re.search(r"^## ([\d.]+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE).group(1)
    if len({cmake, header, newest}) != 1:
        yield f"versions differ: CMakeLists.txt {cmake}, zerofp8.h {header}, CHANGELOG.md {newest}"


def check_results():
    """README's table of results is the one of docs/results."""
    study = (ROOT / "docs/results/byte_gpt.md").read_text().splitlines()
    shown = (ROOT / "README.md").read_text().split("<!-- results:begin -->")[1].split("<!-- results:end -->")[0]
    if shown.strip().splitlines() != [line for line in study if line.startswith("|")]:
        yield "README.md: the results are not those of docs/results/byte_gpt.md; run scripts/loss_study.py --readme"


def main():
    names = tracked()
    faults = [*check_includes(names), *check_lengths(names), *check_orphans(names), *check_links(names), *check_versions(),
              *check_claims(), *check_results()]
    sources = [n for n in names if n.endswith((".h", ".cc"))]
    if len(sources) < 50:
        faults.append(f"only {len(sources)} sources were found: is this the repository?")
    print("\n".join(faults) if faults else f"{len(sources)} sources keep the rules")
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    main()
