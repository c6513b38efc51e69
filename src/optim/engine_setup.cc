// Building an engine: checks before anything is allocated, then the groups of ranks.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <set>

#include "src/optim/adam_scalars.h"
#include "src/optim/engine_impl.h"
#include "zerofp8/error.h"
#include "zerofp8/random.h"

namespace zerofp8 {
namespace {

std::string shape_text(const ParameterSpec& spec) {
  return fmt::format("({})", fmt::join(spec.shape, ", "));
}

bool wants_fp32_moments(const Settings& s, const ParameterSpec& spec) {
  if (spec.fp32_moments) return true;
  if (!moments_are_quantised(s) || s.fp32_moments_below == 0) return false;
  return spec.shape.size() <= 1 || spec.numel() < s.fp32_moments_below;
}

// As RFC 3629 has it: names go into JSON files.
bool is_utf8(std::string_view text) {
  for (std::size_t i = 0; i < text.size();) {
    const auto at = [&](std::size_t k) {
      return k < text.size() ? static_cast<unsigned char>(text[k]) : 0u;
    };
    const unsigned lead = at(i), next = at(i + 1);
    const std::size_t more = lead < 0x80   ? 0
                             : lead < 0xC2 ? 9
                             : lead < 0xE0 ? 1
                             : lead < 0xF0 ? 2
                                           : 3;
    // Too long for what it says, a surrogate, or beyond U+10FFFF.
    const bool odd = lead > 0xF4 || (lead == 0xE0 && next < 0xA0) ||
                     (lead == 0xED && next > 0x9F) || (lead == 0xF0 && next < 0x90) ||
                     (lead == 0xF4 && next > 0x8F);
    if (more == 9 || odd) return false;
    for (std::size_t k = 1; k <= more; ++k) {
      if (at(i + k) < 0x80 || at(i + k) > 0xBF) return false;
    }
    i += more + 1;
  }
  return true;
}

}  // namespace

Engine::Impl::Impl(const Settings& s, std::vector<Parameter> p, const Groups& g, EngineOptions o)
    : settings(s),
      parameters(std::move(p)),
      groups(g),
      options(std::move(o)),
      device(options.device ? options.device : make_cpu_device(options.threads)),
      scaler(s.loss_scale) {
  check_arguments();
  for (Parameter& parameter : parameters) {
    parameter.spec.fp32_moments = wants_fp32_moments(settings, parameter.spec);
  }
  hyper = options.groups.empty() ? std::vector<AdamOptions>{settings.adam} : options.groups;
  check_ranks_agree();
  make_groups();
  make_buckets();
  for (const std::string& warning : settings.warnings) log("zerofp8: warning: " + warning);
  wire_before = wire_total();
}

void Engine::Impl::log(const std::string& line) const {
  if (groups.data->rank() != 0 || (groups.model != nullptr && groups.model->rank() != 0)) return;
  if (options.log) {
    options.log(line);
  } else {
    std::fprintf(stderr, "%s\n", line.c_str());
  }
}

void Engine::Impl::check_parameter(const Parameter& p) const {
  const ParameterSpec& spec = p.spec;
  const int group_count = options.groups.empty() ? 1 : static_cast<int>(options.groups.size());
  const auto fail = [&](const std::string& what) {
    throw ArgumentError(fmt::format("parameter \"{}\"{}", spec.name, what));
  };
  if (spec.dtype != settings.weight && spec.dtype != DType::kFp32) {
    fail(
        fmt::format(" is {}; the config says {} (and fp32 is allowed beside it): change "
                    "/bf16/enabled or /fp16/enabled, or convert the parameter",
                    to_string(spec.dtype), to_string(settings.weight)));
  }
  if (spec.group < 0 || spec.group >= group_count) {
    fail(fmt::format(" is in group {}, but there are {} groups", spec.group, group_count));
  }
  if (!is_utf8(spec.name)) fail(": its name is not UTF-8, which checkpoints need; rename it");
  if (spec.numel() > 0 && p.weight == nullptr) fail(": weight is null");
  if (spec.numel() > std::int64_t{1} << 50) {  // bytes have to fit into 64 bits
    fail(fmt::format(" has {} elements; allowed: up to 2^50", spec.numel()));
  }
  if (spec.numel() > 0) {
    const std::string fault = device->fault_of(p.weight);
    if (!fault.empty()) {
      fail(
          fmt::format(" {}; the engine runs on {}: move the parameter there, or give the engine "
                      "the device that all parameters are on",
                      fault, device->name()));
    }
  }
  if (!spec.reduce_group.empty() && groups.reduce.count(spec.reduce_group) == 0) {
    fail(fmt::format(": reduce group \"{}\" is not in groups.reduce", spec.reduce_group));
  }
  if (!spec.tied.empty() && groups.tied.count(spec.tied) == 0) {
    fail(fmt::format(": tied name \"{}\" is not in groups.tied", spec.tied));
  }
}

// Weights that share memory would lose updates to each other. Side by side is fine.
void Engine::Impl::check_overlaps() const {
  std::vector<const Parameter*> sorted;
  for (const Parameter& p : parameters) {
    if (p.spec.numel() > 0) sorted.push_back(&p);
  }
  const auto begin = [](const Parameter* p) { return reinterpret_cast<std::uintptr_t>(p->weight); };
  const auto end = [&](const Parameter* p) {
    return begin(p) + static_cast<std::uintptr_t>(p->spec.numel() * bytes_of(p->spec.dtype));
  };
  std::stable_sort(sorted.begin(), sorted.end(),
                   [&](const Parameter* a, const Parameter* b) { return begin(a) < begin(b); });
  // Neighbours are enough: the first one that overlaps any before it overlaps the one before it, or
  // that one was told of already.
  for (std::size_t i = 1; i < sorted.size(); ++i) {
    if (begin(sorted[i]) >= end(sorted[i - 1])) continue;
    throw ArgumentError(fmt::format(
        "parameters \"{}\" and \"{}\" overlap in memory, and updates of one would be lost to the "
        "other; give each its own memory, or register what they share once",
        sorted[i - 1]->spec.name, sorted[i]->spec.name));
  }
}

void Engine::Impl::check_memory_of(const std::string& what, const Communicator* comm) const {
  if (comm == nullptr || !device->is_host() || !comm->on_device()) return;
  throw ArgumentError(
      fmt::format("{} ({}) moves device memory, the engine runs on {}; pass "
                  "EngineOptions::device, or a communicator of host memory",
                  what, comm->backend(), device->name()));
}

// What a rank can see by itself. Ranks exchange what they found, so that all of them throw.
void Engine::Impl::check_arguments() const {
  if (groups.data == nullptr) throw ArgumentError("groups.data is null; pass a communicator");
  std::string error;
  try {
    if (groups.data->size() != settings.launch.data_ranks) {
      throw ArgumentError(
          fmt::format("the config was resolved for {} data-parallel ranks, but groups.data has {}; "
                      "resolve it with the launch that runs",
                      settings.launch.data_ranks, groups.data->size()));
    }
    for (const auto& [name, group] : groups.reduce) {
      if (group.comm == nullptr) {
        throw ArgumentError("reduce group \"" + name + "\" has no communicator");
      }
      if (!std::isfinite(group.divisor) || group.divisor < 0) {
        throw ArgumentError(
            fmt::format("reduce group \"{}\": the divisor is {}; allowed: a positive number, or 0 "
                        "for the size of "
                        "the group",
                        name, group.divisor));
      }
      // The norm is summed over the data ranks, so a shard held outside of them would be lost.
      if (group.comm->size() > groups.data->size()) {
        throw ArgumentError(fmt::format(
            "reduce group \"{}\" has {} ranks, groups.data {}: it must be a part of the data ranks",
            name, group.comm->size(), groups.data->size()));
      }
    }
    for (const auto& [name, comm] : groups.tied) {
      if (comm == nullptr) throw ArgumentError("tied name \"" + name + "\" has no communicator");
    }
    check_memory_of("groups.data", groups.data);
    check_memory_of("groups.model", groups.model);
    for (const auto& [name, group] : groups.reduce) {
      check_memory_of("reduce group \"" + name + "\"", group.comm);
    }
    for (const auto& [name, comm] : groups.tied) {
      check_memory_of("tied name \"" + name + "\"", comm);
    }
    if (settings.offload_optimizer == Offload::kCpu && !device->is_host()) {
      throw ArgumentError(
          fmt::format("/zero_optimization/offload_optimizer/device is \"cpu\", the engine runs on "
                      "{}; give it no device, and weights and gradients in host memory, or set the "
                      "key to \"none\"",
                      device->name()));
    }
    if (options.capturable && settings.weight == DType::kFp16) {
      throw ArgumentError(
          "EngineOptions::capturable with /fp16/enabled: whether fp16 weights stay in range and "
          "what "
          "the next loss scale is are decided on the host; use bf16 or fp32, or leave it off");
    }
    for (const AdamOptions& o : options.groups) {
      if (const std::string fault = fault_of(o); !fault.empty()) throw ArgumentError(fault);
    }
    std::set<std::string> names;
    for (const Parameter& p : parameters) {
      check_parameter(p);
      if (!names.insert(p.spec.name).second) {
        throw ArgumentError("parameter \"" + p.spec.name + "\" is registered twice");
      }
    }
    check_overlaps();
  } catch (const Error& e) {
    error = e.what();
    if (groups.data->size() > 1) {
      error = fmt::format("data rank {}: {}", groups.data->rank(), error);
    }
  }
  error = first_error(groups.data, groups.model, error);
  if (!error.empty()) throw ArgumentError(error);
}

// Everything that decides what is sent, or what a rank computes for the others.
ComparedTexts Engine::Impl::compared_texts() const {
  const Settings& s = settings;
  const LossScaleOptions& l = s.loss_scale;
  ComparedTexts texts;
  texts.settings = fmt::format(
      "stage {}\nshard ranks {}\naccumulation {} sharded {} error feedback {}\ngradient wire {}\n"
      "ranks per node {} in-node wire {}\n"
      "weight {} master {}\nexp_avg {}\nexp_avg_sq {}\nblock size {}\nseed {}\nbuckets {} {}\n"
      "overlap {}\nclipping {}\nmicro-batches {}\nloss divided {} capturable {}\n"
      "loss scale {} dynamic {} initial {} window {} hysteresis {} {} minimum {}\n",
      s.stage.value, s.shard_ranks.value, to_string(s.accumulation), s.accumulation_sharded.value,
      s.error_feedback.value, to_string(s.gradient_wire), s.ranks_per_node.value,
      to_string(s.in_node_wire), to_string(s.weight), to_string(s.master), to_string(s.exp_avg),
      to_string(s.exp_avg_sq), s.block_size.value, s.seed.value, s.reduce_bucket_size.value,
      s.allgather_bucket_size.value, s.overlap_comm.value, s.gradient_clipping.value,
      s.batch.accumulation_steps, options.loss_is_divided, options.capturable, l.enabled, l.dynamic,
      l.initial, l.window, l.hysteresis, l.consecutive_hysteresis, l.min_scale);
  for (std::size_t i = 0; i < hyper.size(); ++i) {
    const AdamOptions& o = hyper[i];
    texts.parameters +=
        fmt::format("group {}: {} lr {} betas {} {} eps {} weight decay {}\n", i,
                    to_string(o.algorithm), o.lr, o.beta1, o.beta2, o.eps, o.weight_decay);
  }
  texts.parameters += fmt::format("{} parameters\n", parameters.size());
  const auto line = [](const ParameterSpec& p, const std::string& name) {
    return fmt::format(
        "parameter {} {} {} group {} reduce \"{}\" tied \"{}\" in norm {} fp32 moments {}\n", name,
        shape_text(p), to_string(p.dtype), p.group, p.reduce_group, p.tied, p.counts_in_norm,
        p.fp32_moments);
  };
  for (const Parameter& p : parameters) {
    const ParameterSpec& spec = p.spec;
    const bool expert = !spec.reduce_group.empty();
    texts.parameters += line(spec, expert ? "(of a reduce group)" : spec.name);
    if (expert) texts.named[spec.reduce_group] += line(spec, spec.name);
    if (!spec.tied.empty()) {
      texts.tied[spec.tied] += fmt::format("{} {}\n", shape_text(spec), to_string(spec.dtype));
    }
  }
  return texts;
}

// The same text on every rank, or an error that names the first difference; nothing was allocated
// yet. A difference inside one group is told to the ranks of all of them.
void Engine::Impl::check_ranks_agree() const {
  const ComparedTexts texts = compared_texts();
  std::string error;
  const auto compare = [&](Communicator& comm, const std::string& what, const std::string& text) {
    try {
      check_same_on_all_ranks(comm, what, text);
    } catch (const CommError& e) {
      if (!e.absent_ranks().empty()) throw;  // nobody is left to be told
      if (error.empty()) error = e.what();
    }
  };
  if (groups.model != nullptr) compare(*groups.model, "zerofp8 settings", texts.settings);
  compare(*groups.data, "zerofp8 settings and parameters", texts.settings + texts.parameters);
  for (const auto& [name, group] : groups.reduce) {
    const auto found = texts.named.find(name);
    compare(*group.comm, "parameters of reduce group \"" + name + "\"",
            found == texts.named.end() ? "" : found->second);
  }
  for (const auto& [name, comm] : groups.tied) {
    const auto found = texts.tied.find(name);
    compare(*comm, "tied parameter \"" + name + "\"",
            found == texts.tied.end() ? "" : found->second);
  }
  error = first_error(groups.data, groups.model, error);
  if (!error.empty()) throw CommError(error);
}

void Engine::Impl::make_groups() {
  const int ranks = groups.data->size();
  if (is_hybrid(settings)) {
    const int d = settings.shard_ranks;
    const int rank = groups.data->rank();
    shard_comm = groups.data->split(rank / d, rank);
    replica_comm = groups.data->split(rank % d, rank);
  }
  if (is_two_level(settings)) {
    Communicator& shard = shard_comm ? *shard_comm : *groups.data;
    const int k = settings.ranks_per_node;
    in_node_comm = shard.split(shard.rank() / k, shard.rank());
    across_comm = shard.split(shard.rank() % k, shard.rank());
  }
  if (settings.accumulation_sharded && ranks > 1) {
    micro_batch_comm = groups.data->split(0, groups.data->rank());
  }
  reduce_comms = {groups.data};
  for (const auto& [name, group] : groups.reduce) {
    if (std::find(reduce_comms.begin(), reduce_comms.end(), group.comm) == reduce_comms.end()) {
      reduce_comms.push_back(group.comm);
    }
  }
  std::vector<ParameterSpec> specs;
  for (const Parameter& p : parameters) specs.push_back(p.spec);
  PartitionOptions po;
  po.shard_ranks = settings.stage == 0 ? ranks : settings.shard_ranks.value;
  po.block_size = settings.block_size;
  po.bucket_elements = settings.reduce_bucket_size;
  for (const auto& [name, group] : groups.reduce) po.group_shard_ranks[name] = group.comm->size();
  partition = make_partition(specs, po);
}

Communicator* Engine::Impl::reduce_comm_of(int parameter) const {
  const Partition::Home home = partition.homes[parameter];
  if (home.bucket >= 0) return buckets[home.bucket].reduce_comm;
  const std::string& name = parameters[parameter].spec.reduce_group;
  return name.empty() ? groups.data : groups.reduce.at(name).comm;
}

WireBytes Engine::Impl::wire_total() const {
  std::set<const Communicator*> seen;
  WireBytes total;
  const auto count = [&](const Communicator* comm) {
    if (comm != nullptr && seen.insert(comm).second) total += comm->bytes_sent();
  };
  count(groups.data);
  count(groups.model);
  count(shard_comm.get());
  count(replica_comm.get());
  count(in_node_comm.get());
  count(across_comm.get());
  count(micro_batch_comm.get());
  for (const auto& [name, group] : groups.reduce) count(group.comm);
  for (const auto& [name, comm] : groups.tied) count(comm);
  return total;
}

}  // namespace zerofp8
