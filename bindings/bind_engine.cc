// The engine: owns its communicators, releases the GIL wherever it may wait.
#include <fmt/format.h>
#include <pybind11/functional.h>
#include <pybind11/stl.h>

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bindings/bind.h"
#include "bindings/this_process.h"
#include "zerofp8/device.h"
#include "zerofp8/engine.h"
#include "zerofp8/error.h"

namespace py = pybind11;

namespace zerofp8::python {
namespace {

using Release = py::call_guard<py::gil_scoped_release>;
using SharedComm = std::shared_ptr<Communicator>;

DType dtype_from(const std::string& name) {
  const auto dtype = dtype_from_string(name);
  if (!dtype) throw ArgumentError("dtype \"" + name + "\"; allowed: fp32, bf16, fp16");
  return *dtype;
}

struct EngineArguments {
  Settings settings;
  std::vector<Parameter> parameters;
  std::vector<AdamOptions> groups;
  SharedComm data, model;
  std::map<std::string, SharedComm> tied;
  std::map<std::string, std::pair<SharedComm, double>> reduce;
  bool loss_is_divided = false;
  int threads = 1;
  std::shared_ptr<Device> device;
  bool capturable = false;
};

// An engine and the communicators that must outlive it.
class PyEngine {
 public:
  PyEngine(EngineArguments a, std::function<void(const std::string&)> log)
      : data_(std::move(a.data)),
        model_(std::move(a.model)),
        tied_(std::move(a.tied)),
        reduce_(std::move(a.reduce)),
        data_rank_(data_->rank()),
        // A rank may share its part of the model with none and still be connected to other stages.
        backend_((model_ && data_->size() == 1 ? model_ : data_)->backend()) {
    Groups groups{.data = data_.get(), .model = model_.get(), .reduce = {}, .tied = {}};
    for (const auto& [name, comm] : tied_) groups.tied[name] = comm.get();
    for (const auto& [name, group] : reduce_) {
      groups.reduce[name] = {group.first.get(), group.second};
    }
    const py::gil_scoped_release release;
    engine_ =
        of_this_process(std::make_unique<Engine>(a.settings, std::move(a.parameters), groups,
                                                 EngineOptions{.groups = std::move(a.groups),
                                                               .loss_is_divided = a.loss_is_divided,
                                                               .capturable = a.capturable,
                                                               .threads = a.threads,
                                                               .device = std::move(a.device),
                                                               .log = std::move(log)}));
  }

  Engine& engine() {
    if (!engine_) throw ArgumentError("the engine is closed");
    return *engine_;
  }
  // Gives the communicators back, too: MPI ends with the last of them.
  void close() {
    engine_.reset();
    for (SharedComm* comm : {&data_, &model_}) comm->reset();
    tied_.clear();
    reduce_.clear();
  }
  int data_rank() const { return data_rank_; }
  const std::string& backend() const { return backend_; }

 private:
  SharedComm data_, model_;
  std::map<std::string, SharedComm> tied_;
  std::map<std::string, std::pair<SharedComm, double>> reduce_;
  int data_rank_;
  std::string backend_;
  std::shared_ptr<Engine> engine_;  // has communicators of its own, split from these
};

void bind_parameter(py::module_& m) {
  py::class_<Parameter>(m, "Parameter")
      .def(py::init([](const std::string& name, const std::vector<std::int64_t>& shape,
                       const std::string& dtype, std::uintptr_t weight, int group,
                       const std::string& reduce_group, const std::string& tied,
                       bool counts_in_norm) {
             Parameter p;
             p.spec = {.name = name,
                       .shape = shape,
                       .dtype = dtype_from(dtype),
                       .group = group,
                       .reduce_group = reduce_group,
                       .tied = tied,
                       .counts_in_norm = counts_in_norm};
             p.weight = reinterpret_cast<void*>(weight);
             return p;
           }),
           py::arg("name"), py::arg("shape"), py::arg("dtype"), py::arg("weight"),
           py::arg("group") = 0, py::arg("reduce_group") = "", py::arg("tied") = "",
           py::arg("counts_in_norm") = true);
}

template <class Kind>
Kind kind_from(const char* call, const std::string& name,
               const std::vector<std::pair<const char*, Kind>>& kinds) {
  std::string allowed;
  for (const auto& [known, kind] : kinds) {
    if (name == known) return kind;
    allowed += (allowed.empty() ? "" : ", ") + std::string(known);
  }
  throw ArgumentError(fmt::format("{}: given \"{}\"; allowed: {}", call, name, allowed));
}
StateKind state_kind_from(const std::string& name) {
  return kind_from<StateKind>("full_state", name,
                              {{"gradient", StateKind::kGradient},
                               {"master", StateKind::kMaster},
                               {"exp_avg", StateKind::kExpAvg},
                               {"exp_avg_sq", StateKind::kExpAvgSq}});
}
NormKind norm_kind_from(const std::string& name) {
  return kind_from<NormKind>("gradient_norms", name,
                             {{"two", NormKind::kTwo}, {"inf", NormKind::kInfinity}});
}

py::bytes as_bytes(const std::vector<float>& values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(float)};
}

void bind_state(py::class_<PyEngine>& engine) {
  engine
      .def("full_state",
           [](PyEngine& e, int parameter, const std::string& kind) {
             const StateKind which = state_kind_from(kind);
             std::vector<float> values;
             {
               const py::gil_scoped_release release;
               values = e.engine().full_state(parameter, which);
             }
             return as_bytes(values);
           })
      .def("set_full_state",
           [](PyEngine& e, int parameter, const std::string& kind, const py::buffer& values) {
             const py::buffer_info view = values.request();
             if (view.format != py::format_descriptor<float>::format() ||
                 PyBuffer_IsContiguous(view.view(), 'C') == 0) {
               throw ArgumentError("set_full_state: given numbers of format \"" + view.format +
                                   "\"; allowed: contiguous FP32");
             }
             const std::span span(static_cast<const float*>(view.ptr),
                                  static_cast<std::size_t>(view.size));
             const py::gil_scoped_release release;
             e.engine().set_full_state(parameter, state_kind_from(kind), span);
           })
      .def("set_step", [](PyEngine& e, int p, std::int64_t t) { e.engine().set_step(p, t); })
      .def("own_state",
           [](PyEngine& e, int parameter, const std::string& kind) {
             py::list list;
             for (const OwnState& own : e.engine().own_state(parameter, state_kind_from(kind))) {
               list.append(py::make_tuple(own.offset, as_bytes(own.values)));
             }
             return list;
           })
      .def("state_pieces",
           [](PyEngine& e) {
             py::list list;
             for (const StatePiece& p : e.engine().state_pieces()) {
               list.append(py::make_tuple(p.parameter, p.name, p.dtype, p.bytes.size()));
             }
             return list;
           })
      // In the order of state_pieces; of these numbers only, if given.
      .def(
          "read_pieces",
          [](PyEngine& e, const std::optional<std::vector<std::size_t>>& only) {
            const std::vector<StatePiece> pieces = e.engine().state_pieces();
            py::list list;
            const auto add = [&](const StatePiece& p) {
              std::string bytes(p.bytes.size(), '\0');
              e.engine().read_piece(p, bytes.data());
              list.append(py::bytes(bytes));
            };
            if (only) {
              for (const std::size_t i : *only) add(pieces.at(i));
            } else {
              for (const StatePiece& p : pieces) add(p);
            }
            return list;
          },
          py::arg("only") = py::none())
      .def("write_pieces",
           [](PyEngine& e, const std::vector<py::buffer>& values) {
             const std::vector<StatePiece> pieces = e.engine().state_pieces();
             std::vector<py::buffer_info> views;
             for (const py::buffer& value : values) views.push_back(value.request());
             if (views.size() != pieces.size()) {
               throw ArgumentError(fmt::format("write_pieces: given {} pieces; allowed: {}",
                                               views.size(), pieces.size()));
             }
             for (std::size_t i = 0; i < pieces.size(); ++i) {
               const auto size = static_cast<std::size_t>(views[i].size * views[i].itemsize);
               if (PyBuffer_IsContiguous(views[i].view(), 'C') == 0) {
                 throw ArgumentError(fmt::format("write_pieces: piece {} is not contiguous", i));
               }
               if (size != pieces[i].bytes.size()) {
                 throw ArgumentError(fmt::format("write_pieces: piece {} has {} bytes; allowed: {}",
                                                 i, size, pieces[i].bytes.size()));
               }
             }
             for (std::size_t i = 0; i < pieces.size(); ++i) {
               e.engine().write_piece(pieces[i], views[i].ptr);
             }
           })
      .def("counters",
           [](PyEngine& e) {
             const StateCounters c = e.engine().counters();
             py::dict d;
             d["applied"] = c.applied;
             d["skipped"] = c.skipped;
             d["loss_scale"] = c.loss_scale;
             d["clean_steps"] = c.clean_steps;
             d["hysteresis_left"] = c.hysteresis_left;
             d["steps"] = c.steps;
             d["guard_c"] = c.guard_c;
             return d;
           })
      .def("restore_counters", [](PyEngine& e, const py::dict& d) {
        e.engine().restore_counters(
            {d["applied"].cast<std::int64_t>(), d["skipped"].cast<std::int64_t>(),
             d["loss_scale"].cast<double>(), d["clean_steps"].cast<std::int64_t>(),
             d["hysteresis_left"].cast<int>(), d["steps"].cast<std::vector<std::int64_t>>(),
             d["guard_c"].cast<std::vector<double>>()});
      });
}

void bind_plan(py::class_<PyEngine>& engine) {
  engine.def("plan_table", [](PyEngine& e) { return plan_table(e.engine().plan()); })
      .def("plan_json", [](PyEngine& e) { return plan_json(e.engine().plan()); })
      .def("settings_table", [](PyEngine& e) { return settings_table(e.engine().settings()); })
      .def("planned_state_bytes", [](PyEngine& e) { return e.engine().plan().state_bytes(); })
      .def("bytes_per_parameter",
           [](PyEngine& e) { return e.engine().plan().bytes_per_parameter(); })
      .def("allocated_bytes", [](PyEngine& e) {
        std::map<std::string, std::size_t> bytes;
        for (int i = 0; i < kComponentCount; ++i) {
          const auto component = static_cast<Component>(i);
          bytes[std::string(to_string(component))] = e.engine().allocator().bytes(component);
        }
        return bytes;
      });
}

}  // namespace

void bind_device(py::module_& m) {
  py::class_<Device, std::shared_ptr<Device>>(
      m, "Device", "Where an engine's state and kernels are; for one engine.")
      .def_property_readonly("name", &Device::name)
      .def("synchronize", &Device::synchronize, Release());
  m.def(
      "cuda_device",
      [](int index, std::uintptr_t stream) -> std::shared_ptr<Device> {
        return make_cuda_device(index, reinterpret_cast<void*>(stream));
      },
      py::arg("index"), py::arg("stream"));
  m.def("why_no_cuda", &why_no_cuda, py::arg("index") = 0);
}

void bind_engine(py::module_& m) {
  bind_parameter(m);
  bind_report(m);
  bind_device(m);
  py::class_<PyEngine> engine(m, "Engine");
  engine
      .def(
          py::init([](const Settings& settings, std::vector<Parameter> parameters,
                      std::vector<AdamOptions> groups, SharedComm data, SharedComm model,
                      std::map<std::string, SharedComm> tied,
                      std::map<std::string, std::pair<SharedComm, double>> reduce,
                      bool loss_is_divided, int threads, std::shared_ptr<Device> device,
                      bool capturable, std::function<void(py::str)> log) {
            std::function<void(const std::string&)> say;
            if (log) {
              say = [log = std::move(log)](const std::string& line) {
                const py::gil_scoped_acquire gil;
                log(text_of(line));
              };
            }
            return std::make_unique<PyEngine>(
                EngineArguments{settings, std::move(parameters), std::move(groups), std::move(data),
                                std::move(model), std::move(tied), std::move(reduce),
                                loss_is_divided, threads, std::move(device), capturable},
                std::move(say));
          }),
          py::arg("settings"), py::arg("parameters"), py::arg("groups"), py::arg("data"),
          py::arg("model") = nullptr, py::arg("tied") = std::map<std::string, SharedComm>{},
          py::arg("reduce") = std::map<std::string, std::pair<SharedComm, double>>{},
          py::arg("loss_is_divided") = false, py::arg("threads") = 1, py::arg("device") = nullptr,
          py::arg("capturable") = false, py::arg("log") = nullptr)
      .def("close", &PyEngine::close, Release())
      .def(
          "add_gradient",
          [](PyEngine& e, int parameter, std::uintptr_t data, const std::string& dtype) {
            e.engine().add_gradient(parameter, reinterpret_cast<const void*>(data),
                                    dtype_from(dtype));
          },
          py::arg("parameter"), py::arg("data"), py::arg("dtype"), Release())
      .def(
          "end_micro_batch", [](PyEngine& e) { e.engine().end_micro_batch(); }, Release())
      .def(
          "reduce_gradients", [](PyEngine& e) { e.engine().reduce_gradients(); }, Release())
      .def(
          "step", [](PyEngine& e) { return e.engine().step(); }, Release())
      .def(
          "enqueue_step", [](PyEngine& e) { e.engine().enqueue_step(); }, Release())
      .def(
          "fetch_report", [](PyEngine& e) { return e.engine().fetch_report(); }, Release())
      .def(
          "write_groups", [](PyEngine& e) { e.engine().write_groups(); }, Release())
      .def(
          "discard_gradients", [](PyEngine& e) { e.engine().discard_gradients(); }, Release())
      .def(
          "grad_norm", [](PyEngine& e) { return e.engine().grad_norm(); }, Release())
      .def(
          "gradient_norms",
          [](PyEngine& e, const std::string& kind) {
            const py::gil_scoped_release release;
            return e.engine().gradient_norms(norm_kind_from(kind));
          },
          py::arg("kind") = "two")
      .def(
          "discard_gradient",
          [](PyEngine& e, int p, bool keep_zeros) { e.engine().discard_gradient(p, keep_zeros); },
          py::arg("parameter"), py::arg("keep_zeros") = false, Release())
      .def("scale_gradient",
           [](PyEngine& e, int p, double factor) { e.engine().scale_gradient(p, factor); })
      .def("loss_scale", [](PyEngine& e) { return e.engine().loss_scale(); })
      .def("set_trainer_loss_scale",
           [](PyEngine& e, double scale) { e.engine().set_trainer_loss_scale(scale); })
      .def("set_group",
           [](PyEngine& e, int i, const AdamOptions& options) { e.engine().group(i) = options; })
      .def("get_group", [](PyEngine& e, int i) { return e.engine().group(i); })
      .def("data_rank", &PyEngine::data_rank)
      .def("backend", &PyEngine::backend)
      .def(
          "applied_steps", [](PyEngine& e) { return e.engine().applied_steps(); }, Release())
      .def(
          "skipped_steps", [](PyEngine& e) { return e.engine().skipped_steps(); }, Release())
      .def(
          "step_of", [](PyEngine& e, int parameter) { return e.engine().step_of(parameter); },
          Release())
      .def(
          "weight_changed", [](PyEngine& e, int p) { e.engine().weight_changed(p); }, Release())
      .def(
          "raise_on_all_ranks",
          [](PyEngine& e, const std::string& error) { e.engine().raise_on_all_ranks(error); },
          Release())
      .def(
          "weights_changed", [](PyEngine& e) { e.engine().weights_changed(); }, Release())
      .def(
          "save", [](PyEngine& e, const std::string& root) { e.engine().save(root); }, Release())
      .def(
          "load", [](PyEngine& e, const std::string& root) { e.engine().load(root); }, Release());
  bind_state(engine);
  bind_plan(engine);
}

}  // namespace zerofp8::python
