// What the arguments of a launch mean, for every device: views of a sum's summands, and what was
// decided in device memory.
#pragma once

#include <cstdint>

#include "zerofp8/device.h"
#include "zerofp8/element.h"
#include "zerofp8/random.h"

namespace zerofp8::lane {

ZEROFP8_HD View moved(const View& v, std::int64_t bytes) {
  if (v.codes == nullptr) return v;
  char* scales = reinterpret_cast<char*>(v.scales);
  return {v.storage, static_cast<char*>(v.codes) + bytes,
          scales == nullptr ? nullptr : reinterpret_cast<float*>(scales + bytes)};
}

ZEROFP8_HD std::uint64_t key_of(const RandomStream& stream) {
  return stream.step == nullptr ? stream.key : element::random_key(stream.base, *stream.step);
}

ZEROFP8_HD AdamScalars scalars_of(const AdamLaunch& launch) {
  if (launch.step == nullptr) return launch.args.scalars;
  AdamScalars scalars = launch.step->scalars;
  scalars.grad_factor = launch.args.scalars.grad_factor;
  return scalars;
}

// Whether a launch has nothing to do, as was decided on the device.
template <class Args>
ZEROFP8_HD bool is_idle(const Args&) {
  return false;
}
ZEROFP8_HD bool is_idle(const AdamLaunch& launch) {
  return launch.state != nullptr && launch.state->skip != StepSkip::kNone;
}

}  // namespace zerofp8::lane
