// Loading on any number of ranks: choose, check everything, then copy bytes.
#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <memory>
#include <set>

#include "src/optim/checkpoint.h"
#include "src/optim/engine_impl.h"
#include "src/optim/safetensors.h"
#include "zerofp8/error.h"

namespace zerofp8 {
namespace {

namespace fs = std::filesystem;

// Of two folders of one step: step-00000001 < step-00000001-2 < step-00000001-11.
bool later(const std::string& a, const std::string& b) {
  return a.size() != b.size() ? a.size() > b.size() : a > b;
}

// What ROOT/latest names; else the newest complete folder; else ROOT itself.
std::string choose_folder(const std::string& root, std::string& note) {
  if (is_checkpoint(root)) return root;
  const fs::path latest = fs::path(root) / "latest";
  if (fs::exists(latest)) {
    std::string name = read_text(latest.string());
    while (!name.empty() && (name.back() == '\n' || name.back() == ' ')) name.pop_back();
    if (is_checkpoint(fs::path(root) / name)) return (fs::path(root) / name).string();
    note = fmt::format("{} names \"{}\", which is not complete; ", latest.string(), name);
  }
  std::string newest;
  std::int64_t most = -1;
  if (fs::is_directory(root)) {
    for (const auto& entry : fs::directory_iterator(root)) {
      const fs::path index = entry.path() / "index.json";
      if (entry.path().filename().string().rfind("step-", 0) != 0 || !is_checkpoint(entry.path())) {
        continue;
      }
      std::int64_t step = -1;
      try {
        step = run_index_from_json(index.string(), read_text(index.string())).applied;
      } catch (const CheckpointError& e) {
        note += fmt::format("{}; ", e.what());  // an older one may be damaged
        continue;
      }
      if (step > most || (step == most && later(entry.path().string(), newest))) {
        most = step;
        newest = entry.path().string();
      }
    }
  }
  if (newest.empty()) {
    throw CheckpointError(root,
                          note + "holds no complete checkpoint (no latest, no step-*/index.json)");
  }
  return newest;
}

struct Source {
  const CheckpointParameter* parameter = nullptr;
  const ModelIndex* model = nullptr;
};

// One contiguous copy from a file into memory.
struct Read {
  std::size_t file = 0;
  std::int64_t offset = 0;
  std::span<std::byte> out;
};

// Collects and checks everything that one load needs; nothing of the engine is changed.
class Loader {
 public:
  // `known`: names of the parameters of all data ranks.
  Loader(Engine::Impl& engine, std::string folder, std::set<std::string> known)
      : engine_(engine), folder_(std::move(folder)), known_(std::move(known)) {}

  void read_indices() {
    const std::string path = folder_ + "/index.json";
    run_ = run_index_from_json(path, read_text(path));
    if (run_.groups.size() != engine_.hyper.size()) {
      throw CheckpointError(path, fmt::format("has {} parameter groups, the model has {}",
                                              run_.groups.size(), engine_.hyper.size()));
    }
    for (const CheckpointFile& file : run_.models) {
      check_digest(file);
      const std::string name = folder_ + "/" + file.name;
      models_.push_back(model_index_from_json(name, read_text(name)));
      if (models_.back().id != run_.id)
        throw CheckpointError(name, "belongs to another checkpoint");
    }
  }

  // Finds every parameter, in this slice's own index first.
  void match_parameters() {
    std::string missing;
    for (const Parameter& p : engine_.parameters) {
      Source source = find(p.spec.name);
      sources_.push_back(source);
      if (source.parameter == nullptr) {
        missing += (missing.empty() ? "" : ", ") + p.spec.name;
      } else {
        check_parameter(p.spec, source);
      }
    }
    if (!missing.empty())
      throw CheckpointError(folder_, "lacks parameters of the model: " + missing);
    if (models_.size() == 1) check_no_strangers();
  }

  // Each data rank checks its part of the files; the digest covers every byte.
  void check_files() {
    const int rank = engine_.groups.data->rank(), ranks = engine_.groups.data->size();
    int i = 0;
    for (const ModelIndex& model : models_) {
      for (const CheckpointFile& file : model.files) {
        if (i++ % ranks == rank) check_digest(file);
      }
    }
  }

  void plan_reads() {
    for (BucketState& b : engine_.buckets) {
      for (const Segment& s : b.state_segments) plan_segment(b, s);
    }
  }

  // One file after the other: there may be more of them than a process may have open.
  void execute() {
    for (const ShardFile& file : files_) const FileReader still_there(file.path);
    std::stable_sort(reads_.begin(), reads_.end(),
                     [](const Read& a, const Read& b) { return a.file < b.file; });
    std::unique_ptr<FileReader> reader;
    std::size_t open = 0;
    for (const Read& read : reads_) {
      if (reader == nullptr || read.file != open) {
        reader = std::make_unique<FileReader>(files_[read.file].path);
        open = read.file;
      }
      fill(*reader, read);
    }
    for (std::size_t i = 0; i < sources_.size(); ++i) {
      engine_.states[i].step = sources_[i].parameter->step;
      engine_.states[i].guard_c = sources_[i].parameter->guard_c;
    }
    engine_.applied = run_.applied;
    engine_.skipped = run_.skipped;
    engine_.scaler.restore(run_.scaler);
    engine_.hyper = run_.groups;
    engine_.write_counters();
  }

  const RunIndex& run() const { return run_; }

 private:
  struct ShardFile {
    std::string name, path;
    SafetensorsHeader header;
  };

  void fill(const FileReader& reader, const Read& read) {
    Device& device = *engine_.device;
    if (device.is_host()) return reader.read(read.offset, read.out);
    copied_.resize(read.out.size());
    reader.read(read.offset, copied_);
    device.upload(read.out.data(), copied_.data(), copied_.size());
    device.synchronize();  // `copied_` may be written to
  }

  void check_digest(const CheckpointFile& file) const {
    const std::string path = folder_ + "/" + file.name;
    const FileDigest found = digest_of(path);
    if (found.bytes < file.digest.bytes) {
      throw CheckpointError(
          path, fmt::format("is truncated: {} of {} bytes", found.bytes, file.digest.bytes));
    }
    if (!(found == file.digest)) {
      throw CheckpointError(path,
                            fmt::format("is damaged, swapped or from another checkpoint: checksum "
                                        "{:016x}, the index says {:016x}",
                                        found.hash, file.digest.hash));
    }
  }

  Source find(const std::string& name) const {
    const auto in = [&](const ModelIndex& model) -> Source {
      const auto found = model.parameters.find(name);
      return found == model.parameters.end() ? Source{} : Source{&found->second, &model};
    };
    const auto mine = static_cast<std::size_t>(engine_.model_rank());
    if (mine < models_.size()) {
      if (const Source own = in(models_[mine]); own.parameter != nullptr) return own;
    }
    for (const ModelIndex& model : models_) {
      if (const Source other = in(model); other.parameter != nullptr) return other;
    }
    return {};
  }

  void check_parameter(const ParameterSpec& spec, const Source& source) const {
    const CheckpointParameter& p = *source.parameter;
    if (p.shape != spec.shape) {
      throw CheckpointError(
          folder_, fmt::format("parameter \"{}\" has shape ({}), the model's has ({})", spec.name,
                               fmt::join(p.shape, ", "), fmt::join(spec.shape, ", ")));
    }
    const CheckpointFormat mine = engine_.checkpoint_format();
    const CheckpointFormat& saved = source.model->format;
    const auto same = [&](const std::string& key, const std::string& had, const std::string& has) {
      if (had != has) {
        throw CheckpointError(
            folder_, fmt::format("was saved with {} {}, the config says {}; set it to {}", key, had,
                                 has, had));
      }
    };
    same("exp_avg_dtype", saved.exp_avg, mine.exp_avg);
    same("exp_avg_sq_dtype", saved.exp_avg_sq, mine.exp_avg_sq);
    same("master_weights", saved.master, mine.master);
    same("block_size", std::to_string(saved.block_size), std::to_string(mine.block_size));
    same("dtype of parameter \"" + spec.name + "\"", p.dtype, std::string(to_string(spec.dtype)));
    same("fp32 moments of parameter \"" + spec.name + "\" (fp32_moments_below)",
         p.fp32_moments ? "on" : "off", spec.fp32_moments ? "on" : "off");
    std::int64_t covered = 0;
    for (const CheckpointPiece& piece : p.pieces) {
      if (piece.offset != covered) break;
      covered += piece.elements;
    }
    if (covered != spec.numel()) {
      throw CheckpointError(
          folder_,
          fmt::format("parameter \"{}\" is not whole: element {} is missing", spec.name, covered));
    }
  }

  void check_no_strangers() const {
    std::string strangers;
    for (const auto& [name, p] : models_.front().parameters) {
      if (known_.count(name) == 0) strangers += (strangers.empty() ? "" : ", ") + name;
    }
    if (!strangers.empty()) {
      throw CheckpointError(folder_, "holds parameters that the model has not: " + strangers);
    }
  }

  std::size_t index_of(const std::string& name) {
    for (std::size_t i = 0; i < files_.size(); ++i) {
      if (files_[i].name == name) return i;
    }
    ShardFile file{name, folder_ + "/" + name, {}};
    file.header = read_safetensors_header(FileReader(file.path));
    if (file.header.metadata["id"] != run_.id) {
      throw CheckpointError(file.path, "belongs to another checkpoint");
    }
    files_.push_back(std::move(file));
    return files_.size() - 1;
  }

  void plan_segment(BucketState& b, const Segment& s) {
    const Source& source = sources_[static_cast<std::size_t>(s.parameter)];
    const std::string& name = engine_.parameters[static_cast<std::size_t>(s.parameter)].spec.name;
    for (const CheckpointPiece& piece : source.parameter->pieces) {
      const std::int64_t from = std::max(piece.offset, s.parameter_offset);
      const std::int64_t to =
          std::min(piece.offset + piece.elements, s.parameter_offset + s.elements);
      if (from >= to) continue;
      const std::size_t file = index_of(piece.file);
      for (const StoredTensor& t : engine_.stored_tensors(b, s, s.offset)) {
        const std::string key = tensor_name(name, t.component, piece.offset);
        const auto found = files_[file].header.tensors.find(key);
        const std::int64_t want = t.items(piece.elements) * t.item_bytes;
        if (found == files_[file].header.tensors.end() || found->second.bytes != want ||
            found->second.dtype != t.dtype) {
          throw CheckpointError(
              files_[file].path,
              fmt::format("lacks tensor \"{}\" of {} bytes ({})", key, want, t.dtype));
        }
        const std::int64_t skip = (from - piece.offset) / t.elements_per_item * t.item_bytes;
        const std::int64_t at = (from - s.parameter_offset) / t.elements_per_item * t.item_bytes;
        const std::int64_t bytes = t.items(to - from) * t.item_bytes;
        reads_.push_back(
            {file, found->second.begin + skip, {t.data + at, static_cast<std::size_t>(bytes)}});
      }
    }
  }

  Engine::Impl& engine_;
  std::string folder_;
  std::set<std::string> known_;
  RunIndex run_;
  std::vector<ModelIndex> models_;
  std::vector<Source> sources_;
  std::vector<ShardFile> files_;
  std::vector<Read> reads_;
  std::vector<std::byte> copied_;
};

}  // namespace

// Experts have other names on other data ranks.
std::set<std::string> Engine::Impl::names_on_all_ranks() const {
  std::set<std::string> names;
  for (const Parameter& p : parameters) names.insert(p.spec.name);
  if (groups.reduce.empty()) return names;
  std::string mine;
  for (const std::string& name : names) mine += name + '\n';
  for (const std::string& text : gather_texts(*groups.data, mine)) {
    for (std::size_t begin = 0; begin < text.size();) {
      const std::size_t end = text.find('\n', begin);
      names.insert(text.substr(begin, end - begin));
      begin = end + 1;
    }
  }
  return names;
}

void Engine::Impl::load(const std::string& root) {
  refuse_within_step("load");
  std::string error, folder, note;
  const auto run = [&](const auto& action) {  // the same outcome on every rank
    try {
      if (error.empty()) action();
    } catch (const CommError&) {
      throw;
    } catch (const std::exception& e) {
      error = e.what();
    }
    error = first_error(groups.data, groups.model, error);
    if (!error.empty()) throw CheckpointError(root, "nothing was loaded: " + error);
  };
  const bool first = data_rank() == 0 && model_rank() == 0;
  run([&] {
    if (first) folder = choose_folder(root, note);
  });
  folder = gather_texts(*groups.data, folder).front();
  if (groups.model != nullptr) folder = gather_texts(*groups.model, folder).front();
  Loader loader(*this, folder, names_on_all_ranks());
  run([&] { loader.read_indices(); });
  run([&] { loader.check_files(); });
  run([&] {
    loader.match_parameters();
    loader.plan_reads();
  });
  run([&] { loader.execute(); });
  for (ParameterState& state : states) state.used_anywhere = true;
  for (BucketState& b : buckets) gather_weights(b);
  clear_gradients();
  keep_weights();
  scan_fp16_weights();
  wire_before = wire_total();  // what loading sent is not of the next step
  if (loader.run().scaler.scale != scaler.scale()) {
    note += fmt::format("saved with loss scale {}, going on with {}, which the config says; ",
                        loader.run().scaler.scale, scaler.scale());
  }
  if (loader.run().groups.front().algorithm != settings.adam.value.algorithm) {
    note += fmt::format("saved by {}, which goes on although the config says {}; ",
                        to_string(loader.run().groups.front().algorithm),
                        to_string(settings.adam.value.algorithm));
  }
  if (loader.run().seed != settings.seed) {
    note +=
        fmt::format("saved with seed {}, going on with {}: rounding differs from an unbroken run; ",
                    loader.run().seed, settings.seed.value);
  }
  log(fmt::format("zerofp8: {}loaded {} (step {})", note, folder, applied));
}

}  // namespace zerofp8
