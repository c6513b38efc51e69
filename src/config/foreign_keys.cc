#include "src/config/foreign_keys.h"

#include <algorithm>
#include <iterator>
#include <string>

#include "src/config/nearest.h"

namespace zerofp8 {

bool is_comment(std::string_view parent, std::string_view name) {
  constexpr std::string_view kOpen[] = {"", "/optimizer", "/data_types"};
  const bool open = std::find(std::begin(kOpen), std::end(kOpen), parent) != std::end(kOpen);
  return open && (name.starts_with('_') || name.starts_with("//"));
}

bool seems_meant(std::string_view path) {
  constexpr std::string_view kWords[] = {
      "fp8",    "fp16",   "bf16", "dtype",     "precision", "zero",  "batch",     "clip",
      "moment", "master", "adam", "loss_scal", "accum",     "shard", "opt_level", "quant"};
  if (path.size() < 4 || !nearest_key(path).empty()) return true;  // "/", "/q": what for?
  const std::string name = lower_case(path);
  return name.find_first_of("/~", 1) != std::string::npos ||
         std::any_of(std::begin(kWords), std::end(kWords),
                     [&](std::string_view word) { return name.find(word) != std::string::npos; });
}

}  // namespace zerofp8
