#include "src/optim/checkpoint.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "zerofp8/error.h"

namespace zerofp8 {
namespace {

using nlohmann::json;

json to_value(const std::vector<CheckpointFile>& files) {
  json list = json::array();
  for (const CheckpointFile& f : files) {
    list.push_back({{"name", f.name},
                    {"bytes", f.digest.bytes},
                    {"xxh3", fmt::format("{:016x}", f.digest.hash)}});
  }
  return list;
}

std::vector<CheckpointFile> files_from(const json& list) {
  std::vector<CheckpointFile> files;
  for (const json& f : list) {
    files.push_back({f.at("name").get<std::string>(),
                     {f.at("bytes").get<std::int64_t>(),
                      std::stoull(f.at("xxh3").get<std::string>(), nullptr, 16)}});
  }
  return files;
}

// JSON has no infinity (C_t where beta2 is 0).
json number(double x) { return std::isfinite(x) ? json(x) : json("inf"); }
double number_from(const json& v) { return v.is_string() ? INFINITY : v.get<double>(); }

json to_value(const CheckpointParameter& p) {
  json pieces = json::array();
  for (const CheckpointPiece& piece : p.pieces) {
    pieces.push_back(
        {{"file", piece.file}, {"offset", piece.offset}, {"elements", piece.elements}});
  }
  return {{"shape", p.shape},
          {"dtype", p.dtype},
          {"fp32_moments", p.fp32_moments},
          {"step", p.step},
          {"guard_c", number(p.guard_c)},
          {"pieces", pieces}};
}

CheckpointParameter parameter_from(const json& v) {
  CheckpointParameter p;
  p.shape = v.at("shape").get<std::vector<std::int64_t>>();
  p.dtype = v.at("dtype").get<std::string>();
  p.fp32_moments = v.at("fp32_moments").get<bool>();
  p.step = v.at("step").get<std::int64_t>();
  p.guard_c = number_from(v.at("guard_c"));
  for (const json& piece : v.at("pieces")) {
    p.pieces.push_back({piece.at("file").get<std::string>(), piece.at("offset").get<std::int64_t>(),
                        piece.at("elements").get<std::int64_t>()});
  }
  return p;
}

json to_value(const AdamOptions& o) {
  return {{"algorithm", std::string(to_string(o.algorithm))},
          {"lr", o.lr},
          {"betas", {o.beta1, o.beta2}},
          {"eps", o.eps},
          {"weight_decay", o.weight_decay}};
}

AdamOptions group_from(const json& v) {
  AdamOptions o;
  o.algorithm = v.at("algorithm").get<std::string>() == to_string(Algorithm::kAdam)
                    ? Algorithm::kAdam
                    : Algorithm::kAdamW;
  o.lr = v.at("lr").get<double>();
  o.beta1 = v.at("betas").at(0).get<double>();
  o.beta2 = v.at("betas").at(1).get<double>();
  o.eps = v.at("eps").get<double>();
  o.weight_decay = v.at("weight_decay").get<double>();
  return o;
}

// Of the text without the checksum itself. Everything else that is saved has its own in an index.
std::string checksum_of(json value) {
  value.erase("xxh3");
  return fmt::format("{:016x}", hash_of(value.dump()));
}

template <class F>
auto guarded(const std::string& path, const std::string& text, const F& read) {
  try {
    return read(json::parse(text));
  } catch (const std::exception& e) {
    throw CheckpointError(path, std::string("is damaged or not written by zerofp8: ") + e.what());
  }
}

}  // namespace

std::string to_json(const ModelIndex& index) {
  json parameters = json::object();
  for (const auto& [name, p] : index.parameters) parameters[name] = to_value(p);
  const json value = {{"id", index.id},
                      {"format",
                       {{"exp_avg", index.format.exp_avg},
                        {"exp_avg_sq", index.format.exp_avg_sq},
                        {"master", index.format.master},
                        {"weight", index.format.weight},
                        {"block_size", index.format.block_size}}},
                      {"parameters", parameters},
                      {"files", to_value(index.files)}};
  return value.dump(1) + "\n";
}

std::string to_json(const RunIndex& index) {
  json groups = json::array();
  for (const AdamOptions& group : index.groups) groups.push_back(to_value(group));
  json value = {{"zerofp8_checkpoint", index.version},
                {"id", index.id},
                {"applied_steps", index.applied},
                {"skipped_steps", index.skipped},
                {"seed", index.seed},
                {"loss_scale",
                 {{"scale", index.scaler.scale},
                  {"clean_steps", index.scaler.clean_steps},
                  {"hysteresis_left", index.scaler.hysteresis_left}}},
                {"groups", groups},
                {"models", to_value(index.models)}};
  value["xxh3"] = checksum_of(value);
  return value.dump(1) + "\n";
}

ModelIndex model_index_from_json(const std::string& path, const std::string& text) {
  return guarded(path, text, [](const json& v) {
    ModelIndex index;
    index.id = v.at("id").get<std::string>();
    const json& f = v.at("format");
    index.format = {f.at("exp_avg").get<std::string>(), f.at("exp_avg_sq").get<std::string>(),
                    f.at("master").get<std::string>(), f.at("weight").get<std::string>(),
                    f.at("block_size").get<int>()};
    for (const auto& [name, p] : v.at("parameters").items())
      index.parameters[name] = parameter_from(p);
    index.files = files_from(v.at("files"));
    return index;
  });
}

RunIndex run_index_from_json(const std::string& path, const std::string& text) {
  RunIndex read = guarded(path, text, [&](const json& v) {
    RunIndex index;
    index.version = v.at("zerofp8_checkpoint").get<int>();
    if (index.version != kCheckpointVersion) return index;  // may have other fields
    const bool as_written = text == v.dump(1) + "\n";
    if (!as_written || v.at("xxh3").get<std::string>() != checksum_of(v)) {
      throw std::runtime_error("its checksum does not match");
    }
    index.id = v.at("id").get<std::string>();
    index.applied = v.at("applied_steps").get<std::int64_t>();
    index.skipped = v.at("skipped_steps").get<std::int64_t>();
    index.seed = v.at("seed").get<std::uint64_t>();
    const json& s = v.at("loss_scale");
    index.scaler = {s.at("scale").get<double>(), s.at("clean_steps").get<std::int64_t>(),
                    s.at("hysteresis_left").get<int>()};
    for (const json& group : v.at("groups")) index.groups.push_back(group_from(group));
    index.models = files_from(v.at("models"));
    return index;
  });
  if (read.version != kCheckpointVersion) {
    throw CheckpointError(path, fmt::format("has format version {}; this build reads version {}",
                                            read.version, kCheckpointVersion));
  }
  return read;
}

bool is_checkpoint(const std::filesystem::path& folder) {
  return std::filesystem::exists(folder / "index.json");
}

std::string tensor_name(const std::string& parameter, const std::string& component,
                        std::int64_t offset) {
  return fmt::format("{}/{}@{}", parameter, component, offset);
}

std::vector<std::string> gather_texts(Communicator& comm, const std::string& mine) {
  const auto ranks = static_cast<std::size_t>(comm.size());
  const std::int64_t size = static_cast<std::int64_t>(mine.size());
  std::vector<std::int64_t> sizes(ranks);
  comm.gather_control(std::as_bytes(std::span(&size, 1)), std::as_writable_bytes(std::span(sizes)));
  const auto longest = static_cast<std::size_t>(*std::max_element(sizes.begin(), sizes.end()));
  if (longest == 0) return std::vector<std::string>(ranks);
  std::vector<char> send(longest, '\0'), all(longest * ranks);
  std::copy(mine.begin(), mine.end(), send.begin());
  comm.gather_control(std::as_bytes(std::span(send)), std::as_writable_bytes(std::span(all)));
  std::vector<std::string> texts;
  for (std::size_t r = 0; r < ranks; ++r) {
    texts.emplace_back(all.data() + r * longest, static_cast<std::size_t>(sizes[r]));
  }
  return texts;
}

std::string first_error(Communicator* data, Communicator* model, const std::string& mine) {
  std::string first = mine;
  for (Communicator* comm : {data, model}) {
    if (comm == nullptr) continue;
    const std::vector<std::string> texts = gather_texts(*comm, first);
    const auto found =
        std::find_if(texts.begin(), texts.end(), [](const auto& t) { return !t.empty(); });
    first = found == texts.end() ? "" : *found;
  }
  return first;
}

}  // namespace zerofp8
