// The part of the CUDA runtime that the NCCL communicator uses, for machines without a GPU. A
// stream is a queue with a thread of its own that dawdles a little before each piece of work, so
// that whoever relies on the host's order instead of the stream's gets wrong results. "Device
// memory" is the test's own, touched by stream threads only while work is queued.
//
// Misuse is counted rather than thrown: misuse() says what was wrong. Each rank has a device of its
// own; like CUDA, a thread begins on device 0.
#pragma once

#include <cuda_runtime_api.h>

#include <functional>
#include <string>

namespace zerofp8::test {

using Task = std::function<void()>;

void enqueue(cudaStream_t stream, Task task);  // nullptr: the current device's default stream
void synchronize(cudaStream_t stream);
int device_of(cudaStream_t stream);  // -1: there is no such stream

void report_misuse(const std::string& what);
std::string take_misuse();  // what was reported since it was last called

// Makes the n-th call from now of cudaEventRecord on `device` fail; 0: none.
void break_event_record(int device, int nth);
// From now on what is queued on the device's streams counts as captured into a graph, or no longer.
// It runs all the same, as in a replay right behind the capture.
void set_capturing(int device, bool capturing);
// Number of streams (without default ones) and events that exist.
int live_streams();
int live_events();

}  // namespace zerofp8::test
