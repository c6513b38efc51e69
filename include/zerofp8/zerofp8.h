// Everything in one header, and the version.
#pragma once

#include "zerofp8/communicator.h"
#include "zerofp8/config.h"
#include "zerofp8/device.h"
#include "zerofp8/engine.h"
#include "zerofp8/error.h"
#include "zerofp8/launch.h"
#include "zerofp8/plan.h"

namespace zerofp8 {

constexpr const char* version() { return "0.1.0"; }

}  // namespace zerofp8
