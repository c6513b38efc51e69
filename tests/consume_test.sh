#!/usr/bin/env bash
# Installs the build and uses it from projects of their own: by find_package and by add_subdirectory.
# usage: consume_test.sh SOURCE_DIR BUILD_DIR
set -euo pipefail
source_dir=$1 build_dir=$2
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cmake --install "$build_dir" --prefix "$work/prefix" >"$work/log" 2>&1 || { cat "$work/log"; exit 1; }

try() {  # name, cmake arguments...
  local name=$1
  shift
  { cmake -G Ninja -S "$source_dir/tests/consume" -B "$work/$name" "$@" && cmake --build "$work/$name"; } \
    >"$work/log" 2>&1 || { cat "$work/log"; echo "$name failed"; exit 1; }
  echo "$name: $("$work/$name/consume")"
}
try find_package -DCMAKE_PREFIX_PATH="$work/prefix"
try add_subdirectory -DZEROFP8_SOURCE="$source_dir" -DCMAKE_BUILD_TYPE=Release
"$work/prefix/bin/zerofp8" matrix >/dev/null
# A header that is included alone must compile.
for header in "$work/prefix/include/zerofp8/"*.h; do
  echo "#include <zerofp8/$(basename "$header")>" >"$work/alone.cc"
  ${CXX:-c++} -std=c++20 -Wall -Wextra -Werror -fsyntax-only -I "$work/prefix/include" "$work/alone.cc" ||
    { echo "$header does not compile alone"; exit 1; }
done
echo "every public header compiles alone"
