// Config, what the launcher says, and the settings that will run.
#include <pybind11/stl.h>

#include <optional>
#include <string>

#include "bindings/bind.h"
#include "zerofp8/config.h"
#include "zerofp8/error.h"
#include "zerofp8/launch.h"
#include "zerofp8/plan.h"

namespace py = pybind11;

namespace zerofp8::python {
namespace {

OptLevel level_from(const std::string& text) {
  for (const OptLevel level : {OptLevel::kO0, OptLevel::kO1, OptLevel::kO2, OptLevel::kO3}) {
    if (to_string(level) == text) return level;
  }
  throw ConfigError("opt_level", "\"" + text + "\"", "\"O0\", \"O1\", \"O2\" or \"O3\"",
                    "choose one of these");
}

std::string name_of(DType dtype) { return std::string(to_string(dtype)); }

void bind_launch(py::module_& m) {
  py::class_<LaunchEnv>(m, "LaunchEnv")
      .def_readonly("rank", &LaunchEnv::rank)
      .def_readonly("size", &LaunchEnv::size)
      .def_readonly("local_rank", &LaunchEnv::local_rank)
      .def_readonly("local_size", &LaunchEnv::local_size)
      .def_readonly("source", &LaunchEnv::source)
      .def_readonly("by_mpi", &LaunchEnv::by_mpi);
  m.def(
      "detect_launch_env",
      [](const std::optional<std::map<std::string, std::string>>& environment) {
        if (!environment) return detect_launch_env();
        return detect_launch_env([&](const std::string& name) -> std::optional<std::string> {
          const auto found = environment->find(name);
          return found == environment->end() ? std::nullopt : std::optional(found->second);
        });
      },
      py::arg("environment") = py::none());
}

void bind_adam_options(py::module_& m) {
  py::class_<AdamOptions>(m, "AdamOptions")
      .def(py::init<>())
      .def_property(
          "decoupled", [](const AdamOptions& o) { return o.algorithm == Algorithm::kAdamW; },
          [](AdamOptions& o, bool on) { o.algorithm = on ? Algorithm::kAdamW : Algorithm::kAdam; })
      .def_readwrite("lr", &AdamOptions::lr)
      .def_readwrite("beta1", &AdamOptions::beta1)
      .def_readwrite("beta2", &AdamOptions::beta2)
      .def_readwrite("eps", &AdamOptions::eps)
      .def_readwrite("weight_decay", &AdamOptions::weight_decay);
}

void bind_settings(py::module_& m) {
  const auto dtype = [](Setting<DType> Settings::*field) {
    return [field](const Settings& s) { return name_of((s.*field).value); };
  };
  py::class_<Settings>(m, "Settings",
                       "Which dtype every part uses, stage and batch sizes: what will run.")
      .def_property_readonly(
          "opt_level", [](const Settings& s) { return std::string(to_string(s.opt_level.value)); })
      .def_property_readonly("weight", dtype(&Settings::weight))
      .def_property_readonly("accumulation", dtype(&Settings::accumulation))
      .def_property_readonly("gradient_wire", dtype(&Settings::gradient_wire))
      .def_property_readonly("weight_wire", dtype(&Settings::weight_wire))
      .def_property_readonly("exp_avg", dtype(&Settings::exp_avg))
      .def_property_readonly("exp_avg_sq", dtype(&Settings::exp_avg_sq))
      .def_property_readonly(
          "master", [](const Settings& s) { return std::string(to_string(s.master.value)); })
      .def_property_readonly("stage", [](const Settings& s) { return s.stage.value; })
      .def_property_readonly("accumulation_sharded",
                             [](const Settings& s) { return s.accumulation_sharded.value; })
      .def_property_readonly("accumulation_steps",
                             [](const Settings& s) { return s.batch.accumulation_steps; })
      .def_property_readonly("data_ranks", [](const Settings& s) { return s.launch.data_ranks; })
      .def_property_readonly("block_size", [](const Settings& s) { return s.block_size.value; })
      .def_property_readonly("fp32_moments_below",
                             [](const Settings& s) { return s.fp32_moments_below.value; })
      .def_property_readonly("gradient_clipping",
                             [](const Settings& s) { return s.gradient_clipping.value; })
      .def_property_readonly(
          "offload_optimizer",
          [](const Settings& s) { return std::string(to_string(s.offload_optimizer.value)); })
      .def_property_readonly("loss_scaling",
                             [](const Settings& s) { return s.loss_scale.value.enabled; })
      .def_readonly("warnings", &Settings::warnings)
      .def_readonly("assumed", &Settings::assumed)
      .def("table", [](const Settings& s) { return settings_table(s); });
}

}  // namespace

void bind_config(py::module_& m) {
  bind_launch(m);
  bind_adam_options(m);
  bind_settings(m);
  py::class_<Config>(m, "Config", "A parsed config file: what was written.")
      .def_static("parse", &Config::parse, py::arg("text"), py::arg("source") = "config",
                  py::arg("changes") = std::vector<std::string>())
      .def_static("from_file", &Config::from_file, py::arg("path"),
                  py::arg("changes") = std::vector<std::string>())
      .def("canonical", &Config::canonical)
      .def_property_readonly("source", &Config::source);
  m.def(
      "resolve",
      [](const Config& config, int data_ranks, int pipeline_stages, int tensor_ranks,
         const std::optional<std::string>& opt_level, const std::optional<AdamOptions>& auto_adam,
         const std::optional<std::tuple<std::int64_t, std::int64_t, std::int64_t>>& auto_batch,
         const std::optional<double>& auto_gradient_clipping,
         const std::optional<std::string>& weight, bool assume_auto) {
        Arguments arguments;
        if (weight) arguments.weight = dtype_from_string(*weight);
        arguments.assume_auto = assume_auto;
        if (opt_level) arguments.opt_level = level_from(*opt_level);
        arguments.auto_adam = auto_adam;
        if (auto_batch) {
          const auto& [train, micro, steps] = *auto_batch;
          arguments.auto_batch = BatchSizes{train, micro, steps};
        }
        arguments.auto_gradient_clipping = auto_gradient_clipping;
        return resolve(config, {data_ranks, pipeline_stages, tensor_ranks}, arguments);
      },
      py::arg("config"), py::arg("data_ranks") = 1, py::arg("pipeline_stages") = 1,
      py::arg("tensor_ranks") = 1, py::arg("opt_level") = py::none(),
      py::arg("auto_adam") = py::none(), py::arg("auto_batch") = py::none(),
      py::arg("auto_gradient_clipping") = py::none(), py::arg("weight") = py::none(),
      py::arg("assume_auto") = false);
  m.def(
      "support_matrix", [](bool markdown) { return support_matrix(markdown); },
      py::arg("markdown") = false);
}

}  // namespace zerofp8::python
