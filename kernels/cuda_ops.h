// Launchers of the CUDA kernels, without CUDA's headers. Each returns a cudaError_t as a number.
#pragma once

#include "zerofp8/device.h"

namespace zerofp8::cuda {

struct LaunchOn {
  void* stream = nullptr;  // cudaStream_t
  unsigned max_grid = 1;   // thread blocks that the device is filled with
};

int recode(const RecodeArgs& args, const LaunchOn& on);
int accumulate(const AccumulateArgs& args, const LaunchOn& on);
int decode_sum(const DecodeSumArgs& args, const LaunchOn& on);
int sum_squares(const SquaresArgs& args, const LaunchOn& on);
int copy_many(std::span<const Copy> copies, const LaunchOn& on);
int adam(const AdamLaunch& args, const LaunchOn& on);
int split_master(const MasterArgs& args, const LaunchOn& on);
int join_master(const MasterArgs& args, const LaunchOn& on);
int follow_weights(const FollowArgs& args, const LaunchOn& on);
// cuda_step.cu
int make_part(const MakePartArgs& args, const LaunchOn& on);
int combine_parts(const CombinePartsArgs& args, const LaunchOn& on);
int decide(const DecideArgs& args, const LaunchOn& on);

}  // namespace zerofp8::cuda
