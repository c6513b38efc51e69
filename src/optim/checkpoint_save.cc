// Saving: every rank writes its shard, the indices follow, then the folder gets its name.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <random>

#include "src/optim/checkpoint.h"
#include "src/optim/engine_impl.h"
#include "src/optim/safetensors.h"
#include "zerofp8/error.h"

namespace zerofp8 {
namespace {

namespace fs = std::filesystem;

std::string safetensors_dtype(Storage storage) {
  switch (storage) {
    case Storage::kFp32:
      return "F32";
    case Storage::kBf16:
      return "BF16";
    case Storage::kFp16:
    case Storage::kFp16Block:
      return "F16";
    case Storage::kE4m3Block:
      return "F8_E4M3";
    case Storage::kE5m2Block:
      return "F8_E5M2";
    case Storage::kUe4m4Block:
      return "U8";
  }
  return "U8";
}

// Same text on every rank: made by the first one.
std::string from_first_rank(Groups& groups, const std::string& mine) {
  std::string text = gather_texts(*groups.data, mine).front();
  if (groups.model != nullptr) text = gather_texts(*groups.model, text).front();
  return text;
}

std::string new_folder_name(const std::string& root, std::int64_t step) {
  const std::string base = fmt::format("step-{:08d}", step);
  std::string name = base;
  for (int i = 2; fs::exists(fs::path(root) / name); ++i) name = fmt::format("{}-{}", base, i);
  return name;
}

// Nothing in it was written to for an hour. What vanishes meanwhile is another save's doing.
bool is_abandoned(const fs::path& folder) {
  constexpr std::chrono::hours kLongest{1};
  const auto now = fs::file_time_type::clock::now();
  std::error_code gone;
  const auto old = [&](const fs::path& path) {
    const fs::file_time_type written = fs::last_write_time(path, gone);
    return !gone && now - written > kLongest;
  };
  if (!old(folder)) return false;
  fs::directory_iterator it(folder, gone);
  for (; !gone && it != fs::directory_iterator(); it.increment(gone)) {
    if (!old(it->path())) return false;
  }
  return !gone;
}

// Folders of saves that were killed, by the name that a save gives: .tmp- and 16 hex digits.
// Another job, or other ranks of this one, may be saving into the same root: theirs are young.
void remove_unfinished(const std::string& root) {
  std::vector<fs::path> found;
  for (const auto& entry : fs::directory_iterator(root)) {
    const std::string name = entry.path().filename().string();
    const bool ours = name.size() == 21 && name.rfind(".tmp-", 0) == 0 &&
                      name.find_first_not_of("0123456789abcdef", 5) == std::string::npos;
    std::error_code gone;
    if (ours && entry.is_directory(gone) && is_abandoned(entry.path())) {
      found.push_back(entry.path());
    }
  }
  std::error_code ignored;  // two saves may come upon the same one
  for (const fs::path& path : found) fs::remove_all(path, ignored);
}

}  // namespace

std::vector<StoredTensor> Engine::Impl::stored_tensors(BucketState& b, const Segment& s,
                                                       std::int64_t at) {
  const int block = settings.block_size;
  std::vector<StoredTensor> tensors;
  tensors.push_back({"weight",
                     b.bucket->dtype == DType::kFp32   ? "F32"
                     : b.bucket->dtype == DType::kBf16 ? "BF16"
                                                       : "F16",
                     weight_of(b, s), 1, bytes_of(b.bucket->dtype)});
  if (b.master_bits != 0) {
    tensors.push_back({"master",
                       b.master_bits == 32   ? "F32"
                       : b.master_bits == 16 ? "U16"
                                             : "U8",
                       b.master.data() + at * b.master_bits / 8, 1, b.master_bits / 8});
  }
  const auto add = [&](const std::string& name, const View& whole) {
    const View view = whole.at(at, block);
    tensors.push_back({name, safetensors_dtype(view.storage), static_cast<std::byte*>(view.codes),
                       1, bytes_of(view.storage)});
    if (view.scales != nullptr) {
      tensors.push_back({name + ".scale", "F32", reinterpret_cast<std::byte*>(view.scales), block,
                         std::int64_t{sizeof(float)}});
    }
  };
  add("exp_avg", b.exp_avg);
  add(b.exp_avg_sq.storage == Storage::kFp32 ? "exp_avg_sq" : "exp_avg_sq_root", b.exp_avg_sq);
  return tensors;
}

CheckpointFormat Engine::Impl::checkpoint_format() const {
  return {std::string(to_string(settings.exp_avg)), std::string(to_string(settings.exp_avg_sq)),
          std::string(to_string(settings.master)), std::string(to_string(settings.weight)),
          settings.block_size};
}

// Writes this rank's file and returns its part of the model index.
ModelIndex Engine::Impl::write_shard(const std::string& folder, const std::string& id) {
  ModelIndex index;
  index.id = id;
  index.format = checkpoint_format();
  const std::string name = fmt::format("model-{:05d}.data-{:05d}-of-{:05d}.safetensors",
                                       model_rank(), data_rank(), groups.data->size());
  std::vector<TensorEntry> entries;
  std::vector<std::span<const std::byte>> data;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const ParameterSpec& spec = parameters[i].spec;
    index.parameters[spec.name] = {.shape = spec.shape,
                                   .dtype = std::string(to_string(spec.dtype)),
                                   .fp32_moments = spec.fp32_moments,
                                   .step = states[i].step,
                                   .guard_c = states[i].guard_c,
                                   .pieces = {}};
  }
  for (BucketState& b : buckets) {
    if (!b.first_replica) continue;
    for (const Segment& s : b.shard_segments) {
      const std::string& parameter = parameters[s.parameter].spec.name;
      index.parameters[parameter].pieces.push_back({name, s.parameter_offset, s.elements});
      for (const StoredTensor& t : stored_tensors(b, s, s.offset + b.shard_begin - b.state_begin)) {
        const std::int64_t items = t.items(s.elements);
        entries.push_back({.name = tensor_name(parameter, t.component, s.parameter_offset),
                           .dtype = t.dtype,
                           .shape = {items},
                           .bytes = items * t.item_bytes});
        data.emplace_back(t.data, static_cast<std::size_t>(items * t.item_bytes));
      }
    }
  }
  std::vector<std::byte> memory;
  const FileDigest digest =
      write_safetensors(folder + "/" + name, entries, {{"format", "zerofp8"}, {"id", id}},
                        [&](std::size_t i) { return on_host(data[i], memory); });
  index.files.push_back({name, digest});
  return index;
}

// Data rank 0 merges the parts of its slice; the first rank of all writes the run's index, last.
void Engine::Impl::write_indices(const std::string& folder, const ModelIndex& mine) {
  ModelIndex merged{.id = mine.id, .format = mine.format, .parameters = {}, .files = {}};
  for (const std::string& text : gather_texts(*groups.data, to_json(mine))) {
    ModelIndex part = model_index_from_json(folder, text);
    merged.files.insert(merged.files.end(), part.files.begin(), part.files.end());
    for (auto& [name, p] : part.parameters) {
      const auto [at, inserted] = merged.parameters.emplace(name, p);
      if (inserted) continue;
      auto& pieces = at->second.pieces;
      pieces.insert(pieces.end(), p.pieces.begin(), p.pieces.end());
    }
  }
  std::string error;
  const std::string name = fmt::format("model-{:05d}.json", model_rank());
  FileDigest digest;
  try {
    for (auto& [parameter, p] : merged.parameters) {
      std::sort(p.pieces.begin(), p.pieces.end(),
                [](const auto& a, const auto& b) { return a.offset < b.offset; });
      for (std::size_t i = 1; i < p.pieces.size(); ++i) {
        if (p.pieces[i].offset < p.pieces[i - 1].offset + p.pieces[i - 1].elements) {
          throw CheckpointError(folder,
                                "two ranks hold the same part of parameter \"" + parameter +
                                    "\"; give parameters that differ between ranks names that "
                                    "differ");
        }
      }
    }
    if (data_rank() == 0) digest = write_text_atomically(folder + "/" + name, to_json(merged));
  } catch (const std::exception& e) {
    error = e.what();
  }
  error = first_error(groups.data, groups.model, error);
  if (!error.empty()) throw CheckpointError(folder, error);
  RunIndex run{.id = mine.id,
               .applied = applied,
               .skipped = skipped,
               .seed = settings.seed,
               .scaler = scaler.state(),
               .groups = hyper,
               .models = {}};
  struct Slice {
    FileDigest digest;
  } slice{digest};
  std::vector<Slice> slices(
      groups.model == nullptr ? 1 : static_cast<std::size_t>(groups.model->size()), slice);
  if (groups.model != nullptr) {
    groups.model->gather_control(std::as_bytes(std::span(&slice, 1)),
                                 std::as_writable_bytes(std::span(slices)));
  }
  for (std::size_t m = 0; m < slices.size(); ++m) {
    run.models.push_back({fmt::format("model-{:05d}.json", m), slices[m].digest});
  }
  if (data_rank() == 0 && model_rank() == 0) {
    write_text_atomically(folder + "/index.json", to_json(run));
  }
}

// On all ranks if on any. Buckets of a sharded accumulator may be under way on some ranks only, so
// the question goes where they do not.
void Engine::Impl::refuse_within_step(const std::string& call, bool between_is_fine) const {
  std::string error;
  if (open_micro_batch || (!between_is_fine && (micro_batches != 0 || reduced))) {
    error = fmt::format(
        "{0}: data rank {1} has accumulated gradients since the last step; {0} after step() or "
        "discard_gradients()",
        call, data_rank());
  }
  Communicator* data = micro_batch_comm ? micro_batch_comm.get() : groups.data;
  error = first_error(data, groups.model, error);
  if (!error.empty()) throw ArgumentError(error);
}

// State and weights are those of the last step until the next one.
void Engine::Impl::save(const std::string& root) {
  refuse_within_step("save", true);
  if ((micro_batches != 0 || reduced) && !told_of_saves) {
    told_of_saves = true;
    log("zerofp8: saved between micro-batches: the checkpoint is that of the last step, without "
        "what was accumulated since; after a load begin the step anew (told once)");
  }
  read_counters();
  const bool first = data_rank() == 0 && model_rank() == 0;
  std::string error, name, id;
  if (first) {
    try {
      if (root.empty()) throw ArgumentError("the name of the folder is empty");
      if (is_checkpoint(root)) {
        throw CheckpointError(root, "is a checkpoint itself; give the folder that holds it");
      }
      fs::create_directories(root);
      remove_unfinished(root);
      name = new_folder_name(root, applied);
      id = fmt::format("{:08x}{:08x}", std::random_device{}(), std::random_device{}());
      fs::create_directory(fs::path(root) / (".tmp-" + id));
    } catch (const std::exception& e) {
      error = e.what();
    }
  }
  // The same outcome on every rank.
  const auto run = [&](const auto& action, const std::string& outcome = "nothing was saved") {
    if (error.empty()) {
      try {
        action();
      } catch (const CommError&) {
        throw;
      } catch (const std::exception& e) {
        error = e.what();
      }
    }
    error = first_error(groups.data, groups.model, error);
    if (error.empty()) return;
    std::error_code ignored;
    if (first && !id.empty()) fs::remove_all(fs::path(root) / (".tmp-" + id), ignored);
    throw CheckpointError(root, outcome + ": " + error);
  };
  run([] {});
  id = from_first_rank(groups, id);
  name = from_first_rank(groups, name);
  const std::string temporary = root + "/.tmp-" + id;
  ModelIndex index;
  run([&] { index = write_shard(temporary, id); });
  run([&] { write_indices(temporary, index); });
  run([&] {
    if (!first) return;
    sync_folder(temporary);
    fs::rename(temporary, fs::path(root) / name);
    sync_folder(root);
  });
  run(
      [&] {
        if (first) write_text_atomically(root + "/latest", name + "\n");
      },
      "the checkpoint is complete in " + name + ", but `latest` still names the one before");
}

}  // namespace zerofp8
