#include "src/optim/safetensors.h"

#include <cstring>
#include <nlohmann/json.hpp>

#include "zerofp8/error.h"

namespace zerofp8 {
namespace {

using nlohmann::json;
constexpr std::int64_t kLengthBytes = 8;
constexpr std::int64_t kMaxHeader = 100'000'000;  // the format's own limit

TensorEntry parse_entry(const std::string& path, const std::string& name, const json& value,
                        std::int64_t data_begin, std::int64_t file_size) {
  TensorEntry entry;
  entry.name = name;
  entry.dtype = value.at("dtype").get<std::string>();
  entry.shape = value.at("shape").get<std::vector<std::int64_t>>();
  const auto begin = value.at("data_offsets").at(0).get<std::int64_t>();
  const auto end = value.at("data_offsets").at(1).get<std::int64_t>();
  if (begin < 0 || end < begin || end > file_size - data_begin) {
    throw CheckpointError(path, "is truncated: tensor \"" + name + "\" ends beyond the file");
  }
  entry.begin = data_begin + begin;
  entry.bytes = end - begin;
  return entry;
}

}  // namespace

std::string safetensors_header(const std::vector<TensorEntry>& entries,
                               const std::map<std::string, std::string>& metadata) {
  json header = json::object();
  header["__metadata__"] = metadata;
  std::int64_t at = 0;
  for (const TensorEntry& entry : entries) {
    header[entry.name] = {
        {"dtype", entry.dtype}, {"shape", entry.shape}, {"data_offsets", {at, at + entry.bytes}}};
    at += entry.bytes;
  }
  std::string text = header.dump();
  text.resize((text.size() + 7) / 8 * 8, ' ');  // tensors begin on 8 bytes
  std::string out(kLengthBytes, '\0');
  for (int i = 0; i < 8; ++i) out[i] = static_cast<char>(text.size() >> (8 * i) & 0xFF);
  return out + text;
}

SafetensorsHeader read_safetensors_header(const FileReader& file) {
  if (file.size() < kLengthBytes)
    throw CheckpointError(file.path(), "is truncated: it has no header");
  unsigned char raw[kLengthBytes];
  file.read(0, std::as_writable_bytes(std::span(raw)));
  std::uint64_t length = 0;
  for (int i = 0; i < 8; ++i) length |= std::uint64_t{raw[i]} << (8 * i);
  if (length > kMaxHeader || static_cast<std::int64_t>(length) > file.size() - kLengthBytes) {
    throw CheckpointError(file.path(), "is not a whole safetensors file: its header would have " +
                                           std::to_string(length) + " bytes");
  }
  std::string text(length, '\0');
  file.read(kLengthBytes, std::as_writable_bytes(std::span(text)));
  SafetensorsHeader header;
  try {
    const json parsed = json::parse(text);
    const std::int64_t data_begin = kLengthBytes + static_cast<std::int64_t>(length);
    for (const auto& [name, value] : parsed.items()) {
      if (name == "__metadata__") {
        header.metadata = value.get<std::map<std::string, std::string>>();
      } else {
        header.tensors[name] = parse_entry(file.path(), name, value, data_begin, file.size());
      }
    }
  } catch (const json::exception& e) {
    throw CheckpointError(file.path(), std::string("has a damaged header: ") + e.what());
  }
  return header;
}

}  // namespace zerofp8
