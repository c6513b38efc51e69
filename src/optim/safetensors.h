// The safetensors file format (Hugging Face, "safetensors" 0.4): 8 bytes of little-endian header
// length, a JSON header {name: {dtype, shape, data_offsets}}, then the tensors' bytes without gaps.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "src/optim/file_io.h"

namespace zerofp8 {

struct TensorEntry {
  std::string name;
  std::string dtype;  // "F32", "BF16", "F16", "F8_E4M3", "F8_E5M2", "U8", "U16"
  std::vector<std::int64_t> shape;
  std::int64_t bytes = 0;
  std::int64_t begin = 0;  // of its data in the file; set by the reader
};

// Writes all tensors; data(i) gives the bytes of entry i.
template <class Data>
FileDigest write_safetensors(const std::string& path, const std::vector<TensorEntry>& entries,
                             const std::map<std::string, std::string>& metadata, const Data& data);

std::string safetensors_header(const std::vector<TensorEntry>& entries,
                               const std::map<std::string, std::string>& metadata);

struct SafetensorsHeader {
  std::map<std::string, TensorEntry> tensors;
  std::map<std::string, std::string> metadata;
};
// Throws CheckpointError for anything that is not a whole safetensors file.
SafetensorsHeader read_safetensors_header(const FileReader& file);

template <class Data>
FileDigest write_safetensors(const std::string& path, const std::vector<TensorEntry>& entries,
                             const std::map<std::string, std::string>& metadata, const Data& data) {
  FileWriter writer(path);
  const std::string header = safetensors_header(entries, metadata);
  writer.write(std::as_bytes(std::span(header)));
  for (std::size_t i = 0; i < entries.size(); ++i) writer.write(data(i));
  return writer.finish();
}

}  // namespace zerofp8
