#include <cstddef>
#include <numeric>

#include "zerofp8/communicator.h"

namespace zerofp8 {

std::uint64_t WireBytes::total_payload() const {
  return std::accumulate(payload.begin(), payload.end(), std::uint64_t{0});
}

WireBytes WireBytes::operator-(const WireBytes& other) const {
  WireBytes difference = *this;
  for (std::size_t i = 0; i < payload.size(); ++i) difference.payload[i] -= other.payload[i];
  difference.control -= other.control;
  difference.envelopes -= other.envelopes;
  return difference;
}

WireBytes& WireBytes::operator+=(const WireBytes& other) {
  for (std::size_t i = 0; i < payload.size(); ++i) payload[i] += other.payload[i];
  control += other.control;
  envelopes += other.envelopes;
  return *this;
}

}  // namespace zerofp8
