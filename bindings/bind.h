// What the files of the extension share.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <map>
#include <string>

#include "zerofp8/communicator.h"

namespace zerofp8::python {

void bind_comm(pybind11::module_& m);
void bind_config(pybind11::module_& m);
void bind_engine(pybind11::module_& m);
void bind_report(pybind11::module_& m);

// Bytes per dtype that were sent, "control" and "envelopes".
std::map<std::string, std::uint64_t> wire_as_map(const WireBytes& wire);

}  // namespace zerofp8::python
