// The counters and scalars of a step in device memory (zerofp8/device_step.h), for engines whose
// steps are queued without waiting for them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "zerofp8/buffer.h"
#include "zerofp8/config.h"
#include "zerofp8/device.h"

namespace zerofp8 {

class DeviceStep {
 public:
  // `steps`: group and guarded are set. `data_ranks`, `slices`: how many parts are gathered.
  DeviceStep(Device& device, std::vector<ParameterStep> steps, std::size_t groups, int data_ranks,
             int slices);

  // In device memory.
  StepState* state() { return at<StepState>(state_); }
  const std::uint64_t* applied() { return &state()->applied; }  // for what comes before decide()
  const std::uint64_t* before() { return &state()->before; }    // and after it
  ParameterStep* step(int parameter) { return at<ParameterStep>(steps_at_) + parameter; }
  HyperParameters* groups() { return at<HyperParameters>(groups_at_); }
  std::uint64_t* digest() { return at<std::uint64_t>(digest_); }
  std::uint32_t* refusal() { return at<std::uint32_t>(refusal_); }
  StepPart* mine() { return at<StepPart>(mine_); }
  StepPart* of_data() { return at<StepPart>(of_data_); }
  StepPart* of_slice() { return at<StepPart>(of_slice_); }
  StepPart* of_slices() { return at<StepPart>(of_slices_); }
  StepPart* total() { return at<StepPart>(total_); }

  // Sends what has changed since it was last sent. A capture records no values of the host: throws
  // DeviceError if there is something to send within one.
  void write_groups(const std::vector<AdamOptions>& groups, std::uint64_t digest, bool fault);
  void write_use(const std::vector<bool>& used);
  void write_counters(std::uint64_t applied, std::uint64_t skipped,
                      const std::vector<std::int64_t>& steps, const std::vector<double>& guards);

  // Wait for the device.
  StepState read_state();
  std::vector<ParameterStep> read_steps();
  StepPart read_total();

 private:
  template <class T>
  T* at(std::size_t offset) {
    return reinterpret_cast<T*>(memory_.data() + offset);
  }
  std::size_t reserve(std::size_t bytes);
  void send(void* to, const void* from, std::size_t bytes, const std::string& what);

  Device& device_;
  std::vector<ParameterStep> steps_;  // as last sent or read
  std::size_t size_ = 0;
  std::size_t state_, steps_at_, groups_at_, digest_, refusal_, mine_, of_data_, of_slice_,
      of_slices_, total_;
  Buffer memory_;
  std::vector<HyperParameters> groups_;
  std::uint64_t sent_digest_ = 0;
  bool sent_fault_ = false;
};

}  // namespace zerofp8
