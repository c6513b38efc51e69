// The report of a step: attributes, a dict, and pickles of it (for queues between processes).
#include <fmt/format.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <map>
#include <string>
#include <type_traits>

#include "bindings/bind.h"
#include "zerofp8/dtype.h"
#include "zerofp8/engine.h"

namespace py = pybind11;

namespace zerofp8::python {
namespace {

// All but `wire`, which Python has as a dict.
template <typename Visit>
void each_field(Visit&& visit) {
  visit("applied", &StepReport::applied);
  visit("step", &StepReport::step);
  visit("skipped_steps", &StepReport::skipped_steps);
  visit("micro_batches", &StepReport::micro_batches);
  visit("grad_norm", &StepReport::grad_norm);
  visit("clip_coefficient", &StepReport::clip_coefficient);
  visit("clipped_norm", &StepReport::clipped_norm);
  visit("loss_scale", &StepReport::loss_scale);
  visit("next_loss_scale", &StepReport::next_loss_scale);
  visit("skip_reason", &StepReport::skip_reason);
  visit("bad_parameter", &StepReport::bad_parameter);
  visit("bad_rank", &StepReport::bad_rank);
  visit("unused_parameters", &StepReport::unused_parameters);
}

py::dict as_dict(const StepReport& report) {
  py::dict all;
  each_field([&](const char* name, auto member) { all[name] = report.*member; });
  all["wire"] = wire_as_map(report.wire);
  return all;
}

StepReport from_dict(const py::dict& all) {
  StepReport report;
  each_field([&](const char* name, auto member) {
    auto& value = report.*member;
    value = all[name].cast<std::decay_t<decltype(value)>>();
  });
  for (const auto& [name, bytes] : all["wire"].cast<std::map<std::string, std::uint64_t>>()) {
    if (const auto dtype = dtype_from_string(name)) {
      report.wire.payload[static_cast<std::size_t>(*dtype)] = bytes;
    }
    if (name == "control") report.wire.control = bytes;
    if (name == "envelopes") report.wire.envelopes = bytes;
  }
  return report;
}

std::string shown(const StepReport& r) {
  return fmt::format(
      "StepReport(applied={}, step={}, skipped_steps={}, micro_batches={}, grad_norm={:.6g}, "
      "clip_coefficient={:.6g}, loss_scale={:g}{})",
      r.applied ? "True" : "False", r.step, r.skipped_steps, r.micro_batches, r.grad_norm,
      r.clip_coefficient, r.loss_scale,
      r.bad_parameter.empty()
          ? ""
          : fmt::format(", bad_parameter='{}', bad_rank={}", r.bad_parameter, r.bad_rank));
}

}  // namespace

void bind_report(py::module_& m) {
  py::class_<StepReport> report(
      m, "StepReport",
      "What a step did: applied or not, norm, clip coefficient, loss scale, wire bytes.");
  each_field([&](const char* name, auto member) { report.def_readonly(name, member); });
  report.def_property_readonly("wire", [](const StepReport& r) { return wire_as_map(r.wire); })
      .def("as_dict", &as_dict)
      .def("__repr__", &shown)
      .def(py::pickle(&as_dict, &from_dict));
}

}  // namespace zerofp8::python
