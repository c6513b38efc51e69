// The extension zerofp8._C: errors, then what the other files bind. Everything that is meant for
// users is wrapped by the Python package.
#include <pybind11/stl.h>

#include <filesystem>
#include <string>
#include <vector>

#include "bindings/bind.h"
#include "bindings/signals.h"
#include "src/comm/work_state.h"
#include "zerofp8/config.h"
#include "zerofp8/error.h"

namespace py = pybind11;

namespace zerofp8::python {
namespace {

// Parts of an error as they are handed over.
py::str part_of(const std::string& text) { return text_of(text); }
py::list part_of(const std::vector<std::string>& texts) {
  py::list list;
  for (const std::string& text : texts) list.append(text_of(text));
  return list;
}
const std::vector<int>& part_of(const std::vector<int>& ranks) { return ranks; }

// The Python classes of zerofp8/errors.py, which carry the parts of an error as attributes.
template <class... Args>
void raise(const char* name, const Args&... args) {
  const py::module_ errors = py::module_::import("zerofp8.errors");
  const py::object interrupt = errors.attr("interrupted");
  if (!interrupt.is_none()) {  // KeyboardInterrupt, as a rule; see signals.h
    errors.attr("interrupted") = py::none();
    PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(interrupt.ptr())), interrupt.ptr());
    return;
  }
  const py::object type = errors.attr(name);
  const py::object error = type(part_of(args)...);
  PyErr_SetObject(type.ptr(), error.ptr());
}

void translate(std::exception_ptr pointer) {
  try {
    if (pointer) std::rethrow_exception(pointer);
  } catch (const UnsupportedError& e) {
    raise("UnsupportedError", e.pointer(), e.given(), e.allowed(), e.fix(), e.others());
  } catch (const ConfigError& e) {
    raise("ConfigError", e.pointer(), e.given(), e.allowed(), e.fix(), e.others());
  } catch (const CommError& e) {
    raise("CommError", std::string(e.what()), e.absent_ranks());
  } catch (const CheckpointError& e) {
    raise("CheckpointError", std::string(e.what()), e.file());
  } catch (const NumericError& e) {
    raise("NumericError", std::string(e.what()));
  } catch (const ArgumentError& e) {
    raise("ArgumentError", std::string(e.what()));
  } catch (const Error& e) {
    raise("Error", std::string(e.what()));
  } catch (const std::filesystem::filesystem_error& e) {  // quotes the path
    raise("Error", std::string(e.what()));
  }
}

}  // namespace
}  // namespace zerofp8::python

PYBIND11_MODULE(_C, m) {
  m.doc() = "The C++ engine of zerofp8; use the package zerofp8 instead.";
  py::register_exception_translator(&zerofp8::python::translate);
  zerofp8::set_interrupt_check(&zerofp8::python::interrupted_by_signal);
  zerofp8::python::bind_config(m);
  zerofp8::python::bind_comm(m);
  zerofp8::python::bind_engine(m);
}
