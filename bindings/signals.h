// Ctrl-C while a thread waits for other ranks with the GIL released.
#pragma once

#include <pybind11/pybind11.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace zerofp8::python {

// The check of work_state.h: runs Python's signal handlers, true if one raised. What it raised is
// kept in zerofp8.errors, which both extension modules see: the wait ends with a CommError, and
// this takes its place where that one leaves C++ (module.cc), whatever it passes on its way.
inline bool interrupted_by_signal() {
  namespace py = pybind11;
  // Python runs handlers in the main thread only; others need not wait for the GIL.
  if (::getpid() != ::syscall(SYS_gettid)) return false;
  const py::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() == 0) return false;
  const py::error_already_set raised;  // takes it
  py::module_::import("zerofp8.errors").attr("interrupted") = raised.value();
  return true;
}

}  // namespace zerofp8::python
