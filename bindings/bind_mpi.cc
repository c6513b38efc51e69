// The extension zerofp8._mpi: communicators over Open MPI. A module of its own, so that the package
// works where there is no MPI library. It hands out the Communicator class of zerofp8._C, which has
// to be imported first.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <vector>

#include "bindings/signals.h"
#include "bindings/this_process.h"
#include "src/comm/mpi_transport.h"
#include "src/comm/p2p_communicator.h"
#include "src/comm/progress.h"
#include "src/comm/transport.h"
#include "src/comm/work_state.h"

namespace py = pybind11;

namespace zerofp8::python {
namespace {

// All ranks of MPI_COMM_WORLD, and groups of them that only their members make. What split()
// settles in messages over a parent, these settle by other means (torch's store) before they open.
class MpiWorld {
 public:
  MpiWorld()
      : transport_(make_mpi_transport(kDefaultChunkBytes)),
        progress_(of_this_process(std::make_unique<Progress>(transport_))) {}

  int rank() const { return transport_->rank(); }
  int size() const { return transport_->size(); }
  int propose() { return transport_->context_ids().propose(); }
  bool reserve(int context) { return transport_->context_ids().reserve(context); }

  std::shared_ptr<Communicator> open(const std::vector<int>& members, int context, double timeout) {
    const auto own = std::find(members.begin(), members.end(), rank());
    return of_this_process<Communicator>(std::make_unique<P2pCommunicator>(
        progress_, Group{static_cast<int>(own - members.begin()), members}, context,
        std::chrono::milliseconds(static_cast<std::int64_t>(timeout * 1000))));
  }

 private:
  std::shared_ptr<Transport> transport_;
  std::shared_ptr<Progress> progress_;
};

}  // namespace
}  // namespace zerofp8::python

PYBIND11_MODULE(_mpi, m) {
  using zerofp8::python::MpiWorld;
  // A copy of the communicators' code is linked into this module, too.
  zerofp8::set_interrupt_check(&zerofp8::python::interrupted_by_signal);
  m.doc() = "Communicators over Open MPI; used by the package where comm_backend is \"mpi\".";
  py::class_<MpiWorld>(m, "World", "All ranks of MPI_COMM_WORLD; starts MPI.")
      .def(py::init(), py::call_guard<py::gil_scoped_release>())
      .def_property_readonly("rank", &MpiWorld::rank)
      .def_property_readonly("size", &MpiWorld::size)
      .def("propose", &MpiWorld::propose)
      .def("reserve", &MpiWorld::reserve, py::arg("context"))
      .def("open", &MpiWorld::open, py::arg("members"), py::arg("context"), py::arg("timeout"));
}
