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

// Texts may quote files, whose bytes are not always UTF-8: such bytes become \\xNN.
inline pybind11::str text_of(const std::string& text) {
  return pybind11::reinterpret_steal<pybind11::str>(
      PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), "backslashreplace"));
}

// Bytes per dtype that were sent, "control" and "envelopes".
std::map<std::string, std::uint64_t> wire_as_map(const WireBytes& wire);

}  // namespace zerofp8::python
