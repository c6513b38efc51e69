// Names of the enumerations of config.h, as printed and as written in a config.
#include "zerofp8/config.h"

namespace zerofp8 {

std::string_view to_string(Origin origin) {
  constexpr std::string_view kNames[] = {"default", "level", "key", "argument"};
  return kNames[static_cast<int>(origin)];
}

std::string_view to_string(OptLevel level) {
  constexpr std::string_view kNames[] = {"O0", "O1", "O2", "O3"};
  return kNames[static_cast<int>(level)];
}

std::string_view to_string(MasterWeights master) {
  constexpr std::string_view kNames[] = {"none", "bits8", "bits16", "fp32"};
  return kNames[static_cast<int>(master)];
}

std::string_view to_string(Algorithm algorithm) {
  constexpr std::string_view kNames[] = {"Adam", "AdamW"};
  return kNames[static_cast<int>(algorithm)];
}

std::string_view to_string(Offload offload) {
  constexpr std::string_view kNames[] = {"none", "cpu"};
  return kNames[static_cast<int>(offload)];
}

}  // namespace zerofp8
