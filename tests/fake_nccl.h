// The part of NCCL that the communicator uses, between threads, on the streams of fake_cuda.h.
// Non-blocking, as it is used: launches come about when they are asked after, a rank that does not
// come leaves the others hanging until they abort, and so do calls that do not fit; nobody is told.
//
// Ranks are known by their device here.
#pragma once

#include <nccl.h>

#include "tests/fake_cuda.h"

namespace zerofp8::test {

// What ncclCommGetAsyncError says from now on for communicators of `device`; ncclSuccess: nothing.
void set_async_error(int device, ncclResult_t error);
// The next ncclGroupEnd, ncclAllGather or ncclBroadcast on `device` returns it.
void fail_next_launch(int device, ncclResult_t error);
void fail_unique_id(bool fail);
// Launches do not come about before all ranks have made one, as for the first exchange of two
// ranks.
void connect_lazily(bool lazily);
// Kernels of communicators of `device` do not begin, whoever has come.
void stall(int device, bool stalled);
// Forgets all of the above.
void mend();

int live_comms();
int aborted_comms();     // so far
int mismatched_calls();  // kernels that met others which did not fit, so far

}  // namespace zerofp8::test
