// Communicators: of a torch process group, or of this process alone.
#include <pybind11/chrono.h>
#include <pybind11/functional.h>
#include <pybind11/stl.h>

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "bindings/bind.h"
#include "bindings/process_group_comm.h"
#include "bindings/this_process.h"
#include "zerofp8/communicator.h"

namespace py = pybind11;

namespace zerofp8::python {
namespace {

using Release = py::call_guard<py::gil_scoped_release>;

std::chrono::milliseconds milliseconds(double seconds) {
  return std::chrono::milliseconds(static_cast<std::int64_t>(seconds * 1000));
}

std::shared_ptr<Communicator> of_group(const std::string& name, double timeout,
                                       GroupFactory make_group) {
  return of_this_process(
      make_process_group_communicator(name, milliseconds(timeout), std::move(make_group)));
}

// Payloads over NCCL on cuda:`device`, control over a torch process group of the same ranks.
std::shared_ptr<Communicator> over_nccl(const std::string& name, double timeout,
                                        GroupFactory make_group, int device) {
  const py::gil_scoped_release release;
  auto control =
      make_process_group_communicator(name, milliseconds(timeout), std::move(make_group));
  control->set_timeout(milliseconds(timeout));
  return of_this_process(make_nccl_communicator(std::move(control), device));
}

// bytes in, list of each rank's bytes out; all ranks pass the same number of bytes.
std::vector<py::bytes> gather(Communicator& comm, const std::string& mine) {
  std::string all(mine.size() * static_cast<std::size_t>(comm.size()), '\0');
  {
    const py::gil_scoped_release release;
    comm.gather_control(std::as_bytes(std::span(mine)), std::as_writable_bytes(std::span(all)));
  }
  std::vector<py::bytes> parts;
  for (int r = 0; r < comm.size(); ++r) {
    parts.emplace_back(all.substr(static_cast<std::size_t>(r) * mine.size(), mine.size()));
  }
  return parts;
}

template <class T>
std::vector<T> all_reduce(Communicator& comm, std::vector<T> values, bool maximum) {
  comm.all_reduce(std::span<T>(values), maximum ? ReduceOp::kMax : ReduceOp::kSum);
  return values;
}

py::bytes all_to_all(Communicator& comm, const std::string& send) {
  std::string received(send.size(), '\0');
  {
    const py::gil_scoped_release release;
    comm.all_to_all(std::as_bytes(std::span(send)), std::as_writable_bytes(std::span(received)),
                    {.dtype = DType::kE4m3, .label = "all_to_all"})
        ->wait();
  }
  return received;
}

}  // namespace

std::map<std::string, std::uint64_t> wire_as_map(const WireBytes& wire) {
  std::map<std::string, std::uint64_t> map;
  for (int i = 0; i < kDTypeCount; ++i) {
    const auto dtype = static_cast<DType>(i);
    if (wire.of(dtype) != 0) map[std::string(to_string(dtype))] = wire.of(dtype);
  }
  map["control"] = wire.control;
  map["envelopes"] = wire.envelopes;
  return map;
}

void bind_comm(py::module_& m) {
  py::class_<Communicator, std::shared_ptr<Communicator>>(m, "Communicator")
      .def_property_readonly("rank", &Communicator::rank)
      .def_property_readonly("size", &Communicator::size)
      .def_property_readonly("backend", &Communicator::backend)
      .def_property_readonly("on_device", &Communicator::on_device)
      .def("bytes_sent", [](const Communicator& c) { return wire_as_map(c.bytes_sent()); })
      .def(
          "set_timeout", [](Communicator& c, double s) { c.set_timeout(milliseconds(s)); },
          py::arg("seconds"))
      .def(
          "barrier", [](Communicator& c, double s) { c.barrier(milliseconds(s)); },
          py::arg("timeout"), Release())
      .def(
          "broadcast",
          [](Communicator& c, std::uintptr_t data, std::size_t bytes, int root) {
            c.broadcast({reinterpret_cast<std::byte*>(data), bytes}, root, {.label = "broadcast"})
                ->wait();
          },
          py::arg("data"), py::arg("bytes"), py::arg("root"), Release())
      .def(
          "check_same",
          [](Communicator& c, const std::string& what, const std::string& text) {
            check_same_on_all_ranks(c, what, text);
          },
          py::arg("what"), py::arg("text"), Release())
      .def("gather", &gather, py::arg("mine"))
      .def("all_to_all", &all_to_all, py::arg("send"))
      .def("all_reduce_f64", &all_reduce<double>, py::arg("values"), py::arg("maximum") = false,
           Release())
      .def("all_reduce_i64", &all_reduce<std::int64_t>, py::arg("values"),
           py::arg("maximum") = false, Release())
      // Calls back into Python to make the group.
      .def(
          "split",
          [](Communicator& c, int color, int key) -> std::shared_ptr<Communicator> {
            const py::gil_scoped_release release;
            return of_this_process(c.split(color, key));
          },
          py::arg("color"), py::arg("key") = 0);
  m.def("process_group_communicator", &of_group, py::arg("name"), py::arg("timeout"),
        py::arg("make_group"));
  m.def("built_with_nccl", &built_with_nccl);
  m.def("nccl_communicator", &over_nccl, py::arg("name"), py::arg("timeout"), py::arg("make_group"),
        py::arg("device"));
  m.def("self_communicator",
        []() -> std::shared_ptr<Communicator> { return make_self_communicator(); });
}

}  // namespace zerofp8::python
