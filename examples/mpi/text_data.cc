#include "text_data.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <stdexcept>

#include "zerofp8/error.h"

namespace zerofp8::example {
namespace {

namespace fs = std::filesystem;

std::string python_library() {
  const char* command = "python3 -c \"import sysconfig; print(sysconfig.get_paths()['stdlib'])\"";
  FILE* pipe = ::popen(command, "r");
  if (pipe == nullptr)
    throw std::runtime_error("cannot run python3 to find its library; name files with --data");
  std::array<char, 4096> line{};
  const bool read = std::fgets(line.data(), line.size(), pipe) != nullptr;
  ::pclose(pipe);
  std::string path = read ? line.data() : "";
  while (!path.empty() && (path.back() == '\n' || path.back() == '\r')) path.pop_back();
  if (!fs::is_directory(path)) {
    throw std::runtime_error(
        "python3's standard library was not found; name text files with --data");
  }
  return path;
}

std::vector<std::string> library_files(const std::string& folder) {
  constexpr std::size_t kFiles = 160;
  std::vector<std::string> files;
  for (const auto& entry : fs::directory_iterator(folder)) {
    if (entry.path().extension() == ".py") files.push_back(entry.path().string());
  }
  std::sort(files.begin(), files.end());
  files.resize(std::min(files.size(), kFiles));
  return files;
}

}  // namespace

TextData::TextData(std::vector<std::string> files) {
  source_ = std::to_string(files.size()) + " files";
  if (files.empty()) {
    const std::string folder = python_library();
    files = library_files(folder);
    source_ = "the Python standard library (" + std::to_string(files.size()) + " modules)";
  }
  std::string text;
  for (const std::string& name : files) {
    std::ifstream in(name, std::ios::binary);
    if (!in) throw ConfigError("--data", name, "text files", "it cannot be read; check the path");
    text.append(std::istreambuf_iterator<char>(in), {});
  }
  if (text.size() < 100'000) {
    throw std::runtime_error("--data: " + std::to_string(text.size()) +
                             " bytes of text are too few; give at least 100,000");
  }
  const auto n = static_cast<std::int64_t>(text.size());
  bytes_ = torch::from_blob(text.data(), {n}, torch::kUInt8).clone();
  train_end_ = n * 95 / 100;
}

Batch TextData::draw(std::uint64_t key, std::int64_t samples, std::int64_t context,
                     std::int64_t begin, std::int64_t end) const {
  std::mt19937_64 random(key);
  Batch batch;
  batch.tokens = torch::empty({samples, context}, torch::kLong);
  batch.targets = torch::empty({samples, context}, torch::kLong);
  for (std::int64_t i = 0; i < samples; ++i) {
    const auto span = static_cast<std::uint64_t>(end - begin - context - 1);
    const auto at = begin + static_cast<std::int64_t>(random() % span);
    batch.tokens[i].copy_(bytes_.slice(0, at, at + context));
    batch.targets[i].copy_(bytes_.slice(0, at + 1, at + context + 1));
  }
  return batch;
}

Batch TextData::train(std::uint64_t key, std::int64_t samples, std::int64_t context) const {
  return draw(key, samples, context, 0, train_end_);
}
Batch TextData::held_out(std::uint64_t key, std::int64_t samples, std::int64_t context) const {
  return draw(key, samples, context, train_end_, size());
}

}  // namespace zerofp8::example
